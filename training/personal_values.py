"""Made-up personal data: names, addresses and numbers in the forms in which people write them."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words("""
aaron abigail adam ahmed aisha alan alex alice amanda amelia amir amy ana andrea andrew angela
anita anna anthony antonio aria arjun arthur ashley astrid barbara ben bianca brian bruno caleb
camila carl carlos carmen caroline catherine cecilia charles charlotte chen chiara chloe christine
claire clara colin daniel david deborah denise dennis diana diego dmitri dorothy edith eduardo
edward elena elias elizabeth ella emil emily emma eric erik ernest esther ethan eva evelyn fatima
felix fernando fiona florence frances francisco frank fred gabriel gemma george gerald gita gloria
grace greta gustav hana hannah harold harry hassan heather hector helen henry hiroshi hugo ian
ibrahim ida igor ines ingrid irene isaac isabel ivan jack jacob james jane jasmine jason javier
jean jennifer jerome jessica jill joan joel johanna john jonas jordan jorge jose joseph joshua
juan judith julia karen karl kate keiko keith kenji kevin khalid kim klaus kofi kyle lara laura
lauren leah leila leo leon leonard liam lily linda lisa louis lucas lucia lucy luis luke magnus
marco margaret maria marie marina mark martha martin mary mateo matthew maya megan mei melissa
michael miguel mila miriam mohammed monica nadia naomi natalie nathan nicole nina noah nora olga
oliver olivia omar oscar otto owen pablo pamela patricia patrick paul pedro peter philip pierre
priya rachel rafael rahul ralph ravi raymond rebecca ricardo richard rita robert roberto roger
rosa rose ruth ryan sabine sam samuel sandra sara sarah scott sean sergei simon sofia sophie
stefan stephen steven susan sven tamara tanya teresa thomas tim tobias tom ulrich ursula vera
victor victoria vikram vincent walter wei wendy william yasmin yuki yusuf zara zoe
""")
LAST = _words("""
abbott adams ahmed alvarez andersen anderson bailey baker barnes bauer becker bell bennett berg
bianchi brooks brown bryant butler campbell carter castillo chang chen clark coleman collins conti
cook cooper costa cox cruz davies davis diaz dubois duarte edwards eriksson evans farrell ferrari
fischer fisher flores foster fournier fox garcia gibson gomez gonzalez graham gray green gupta
haddad hall hamilton hansen harris harrison hayes henderson hernandez hill hoffmann holm horvat
howard hughes hunt hussain ibrahim ivanov jackson jacobs jansen jenkins jensen johansson johnson
jones jordan kaplan kaya keller kelly kennedy khan kim king klein kovacs kowalski kumar lambert
larsen laurent lee lehmann leroy lewis li lindberg long lopez mancini marshall martin martinez
mason mehta mendoza meyer miller mitchell moore morales moreau morgan morris muller murphy murray
myers nakamura nelson nguyen nielsen novak nowak obrien okafor olsen ortiz owens palmer park
parker patel perez perry peters petrov phillips pinto popescu powell price quinn ramirez reed
reyes reynolds ricci richardson rivera roberts robinson rodriguez rogers rossi russell russo ryan
sanchez santos sato schmidt schneider schwarz scott shaw silva simmons singh smith sokolov stewart
sullivan suzuki svensson tanaka taylor thompson torres tran turner usman vargas vasquez virtanen
wagner walker wallace wang ward watson weber wells west white williams wilson wood wright yamamoto
yang yilmaz young zhang zimmermann
""")
_SYLLABLES = _words("""
an ar bel bo cor da del dor el en far fen gal gor han hol is ka kel la lin lo mar mel mi mo na nor
os pe ra ren ri ro sa sel shi so ta ter tho ti tor u va vin wa yo za
""")
_TOWNS = _words("""
albany ashford aurora bedford berlin boston bristol brno burnaby cambridge cardiff clayton cologne
dayton denver dover dublin exeter fairview franklin geneva georgetown glasgow greenville hamburg
houston kingston lakewood leeds leiden lyon madison malmo manchester mesa milan milton munich
nantes newport oakland oslo oxford perth plymouth portland reading richmond riverside salem
salisbury seattle sheffield springfield sydney tampa toledo trenton troy tucson turin utrecht
vienna warsaw winchester york zurich
""")
_STREETS = _words("""
maple oak cedar pine elm church mill park lake hill high main station river spring washington
lincoln victoria king queen bridge forest garden market meadow orchard rose school sunset valley
walnut willow north south east west
""")
_SUFFIXES = _words("""
Street St St. Road Rd Avenue Ave Ave. Lane Ln Drive Dr Court Ct Boulevard Blvd Way Place Close
Crescent Terrace Square
""")
_ABROAD = (
    "{street}straße {n}",
    "{street}weg {n}",
    "{street}gatan {n}",
    "{street}laan {n}",
    "{street}vej {n}",
    "{street} gate {n}",
    "{street} {n}",
    "Rue de {town} {n}",
    "{n} rue de la {street}",
    "{n}, avenue {street}",
    "Via {street} {n}",
    "Calle {street} {n}",
    "ul. {street} {n}",
)
_STATES = _words("""
AL AZ CA CO CT FL GA IL IN KS KY MA MD MI MN MO NC NJ NM NY OH OR PA TN TX UT VA WA WI
""")
_DOMAINS = _words("""
example mail gmail yahoo outlook post inbox web fastnet company school acme hotmail proton
""")
_TLDS = _words("""
com com com net org de fr co.uk edu io it es eu info gov
""")
_WORDS = _words("""
apple bottle candle carpet chair clock cloud coffee copper cotton desert engine feather ferry
garden glass hammer harbor hotel island jacket kettle ladder lemon letter machine market mirror
mountain music needle office orange paper pencil picture pillow river rocket rope saddle school
shadow silver spoon station stone summer table ticket tiger tower travel tunnel valley velvet
village violet water window winter wizard wood yellow
""")
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_IBANS = {
    "DE": 18,
    "GB": 18,
    "FR": 23,
    "NL": 14,
    "ES": 20,
    "IT": 23,
    "CH": 17,
    "AT": 16,
    "BE": 12,
    "SE": 20,
    "PL": 24,
    "NO": 11,
    "DK": 14,
    "IE": 18,
}  # digits and letters after the check


def _digits(chance: random.Random, count: int) -> str:
    return "".join(chance.choices(string.digits, k=count))


def _filled(chance: random.Random, pattern: str) -> str:
    """A pattern with # for a digit, @ for a capital letter."""
    return "".join(
        chance.choice(string.digits)
        if c == "#"
        else chance.choice(string.ascii_uppercase)
        if c == "@"
        else c
        for c in pattern
    )


def _invented(chance: random.Random) -> str:
    return "".join(chance.choices(_SYLLABLES, k=chance.choice((2, 2, 3))))


class Names:
    """Names of people, places and domains: known ones, invented ones, and any words of a text, so
    that a reader learns how they are written rather than a list.

    Args:
        words: lower-case, of the language.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def _any(self, chance: random.Random, known: Sequence[str], share: float) -> str:
        """A known name in a share of cases, or else an invented one or a word."""
        draw = chance.random()
        if draw < share:
            return chance.choice(known)
        return _invented(chance) if draw < (1 + share) / 2 else chance.choice(self._words)

    def first(self, chance: random.Random) -> str:
        """A first name."""
        name = self._any(chance, FIRST, 0.65).capitalize()
        return f"{name}-{chance.choice(FIRST).capitalize()}" if chance.random() < 0.04 else name

    def last(self, chance: random.Random) -> str:
        """A family name."""
        name = self._any(chance, LAST, 0.4).capitalize()
        draw = chance.random()
        if draw < 0.03:
            return "O'" + name
        if draw < 0.07:
            particle = chance.choice(("van", "de", "von", "van der", "al", "di", "del", "la"))
            return f"{particle} {name}"
        if draw < 0.1:
            return f"{name}-{chance.choice(LAST).capitalize()}"
        return f"{chance.choice(('Mc', 'Mac'))}{name}" if draw < 0.12 else name

    def person(self, chance: random.Random) -> str:
        """A person's name in one of its forms."""
        first, last = self.first(chance), self.last(chance)
        initial = chance.choice(string.ascii_uppercase)
        forms = {
            f"{first} {last}": 60,
            first: 14,
            f"{first[0]}. {last}": 8,
            f"{first} {initial}. {last}": 8,
            f"{first} {self.first(chance)} {last}": 6,
            f"{last}, {first}": 4,
        }
        name = chance.choices(list(forms), list(forms.values()))[0]
        draw = chance.random()
        return name.lower() if draw < 0.08 else name.upper() if draw < 0.12 else name

    def email(self, chance: random.Random) -> str:
        """An e-mail address."""
        first, last, word = chance.choice(FIRST), chance.choice(LAST), chance.choice(self._words)
        user = chance.choice(
            (
                first,
                last,
                word,
                f"{first}.{last}",
                f"{first[0]}{last}",
                f"{first}_{last}",
                f"{first}-{last}",
                f"{first}{last}",
                f"{first.capitalize()}{last.capitalize()}",
                f"{first.capitalize()}{word[0].upper()}{last.capitalize()}",
                f"{first}{chance.randrange(1, 2020)}",
                word + _digits(chance, 2),
                f"{first}.{last}+{word}",
                f"{_invented(chance)}{last[0]}",
                "info",
                "support",
            )
        )
        words = (chance.choice(self._words), chance.choice(self._words))
        domain = chance.choice((*_DOMAINS, last, words[0], "-".join(words), "".join(words)))
        if chance.random() < 0.1:
            domain = f"{chance.choice(_WORDS)}.{domain}"
        return f"{user}@{domain}.{chance.choice(_TLDS)}"

    def street(self, chance: random.Random) -> str:
        """A street with a number."""
        name = self._any(chance, _STREETS, 0.25).capitalize()
        if chance.random() < 0.2:
            name += " " + self._any(chance, LAST, 0.3).capitalize()
        number = str(chance.randrange(1, 10 ** chance.choice((1, 2, 3, 4))))
        number += chance.choice(("", "", "", "", "", "a", "B", "-" + number))
        draw = chance.random()
        if draw < 0.3:
            form = chance.choice(_ABROAD)
            return form.format(street=name, n=number, town=self.town(chance))
        if draw < 0.34:
            return f"P.O. Box {number}"
        return f"{number} {name} {chance.choice(_SUFFIXES)}"

    def town(self, chance: random.Random) -> str:
        """A town."""
        return self._any(chance, _TOWNS, 0.4).capitalize()

    def address(self, chance: random.Random) -> str:
        """A street, perhaps with a town and a code."""
        street, town = self.street(chance), self.town(chance)
        if chance.random() < 0.1:
            town = town.upper()
        if chance.random() < 0.15:
            unit = chance.choice((", Apt. {}", " Suite {}", ", Flat {}", " #{}"))
            street += unit.format(chance.randrange(1, 999))
        code = _filled(chance, chance.choice(("#####", "####", "@@# #@@", "@#@ #@#", "### ##")))
        state = f"{chance.choice(_STATES)} {_digits(chance, 5)}"
        return chance.choice(
            (
                street,
                street,
                f"{street}, {town}",
                f"{street}, {town}, {state}",
                f"{street}\n{town}, {state}",
                f"{street}, {code} {town}",
                f"{street}, {town} {code}",
                f"{street} {town}",
                f"{street}\n {town}\n {code}",
                f"{street}\n{code}",
            )
        )


def _phone(chance: random.Random) -> str:
    return _filled(
        chance,
        chance.choice(
            (
                "###-###-####",
                "(###) ###-####",
                "###.###.####",
                "### ### ####",
                "##########",
                "+1 ### ### ####",
                "+1-###-###-####",
                "1-###-###-####",
                "+44 #### ######",
                "+44 20 #### ####",
                "0#### ######",
                "07### ######",
                "+49 ### #######",
                "+49 (0) ## ########",
                "0### #######",
                "+33 # ## ## ## ##",
                "0# ## ## ## ##",
                "+## ### ### ###",
                "+############",
                "00## ### ######",
                "### ## ## ##",
                "##-########",
                "(##) #### ####",
                "###-####",
                "### ####",
                "(###)###-####x###",
                "0##-## ## ## ##",
                "### ### ###",
                "## #### ####",
            )
        ),
    )


def _luhn(body: str) -> str:
    total = 0
    for place, digit in enumerate(reversed(body)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return body + str(-total % 10)


def _card(chance: random.Random) -> str:
    start, length = chance.choice(
        (
            ("4", 16),
            ("4", 16),
            ("51", 16),
            ("55", 16),
            ("34", 15),
            ("37", 15),
            ("6011", 16),
            ("3528", 16),
            ("36", 14),
            ("2221", 16),
            ("5018", 12),
        )
    )
    number = _luhn(start + _digits(chance, length - len(start) - 1))
    mark = chance.choice(("", "", " ", "-"))
    if length == 15:
        return mark.join((number[:4], number[4:10], number[10:]))
    return mark.join(number[i : i + 4] for i in range(0, length, 4))


def _iban(chance: random.Random) -> str:
    country = chance.choice(list(_IBANS))
    body = _digits(chance, _IBANS[country])
    if country in ("GB", "NL", "IE"):
        body = _filled(chance, "@@@@") + body[4:]
    as_number = "".join(str(int(c, 36)) for c in body + country + "00")
    iban = f"{country}{98 - int(as_number) % 97:02}{body}"
    return (
        " ".join(iban[i : i + 4] for i in range(0, len(iban), 4)) if chance.random() < 0.5 else iban
    )


def _ip(chance: random.Random) -> str:
    if chance.random() < 0.8:
        return ".".join(
            str(chance.choice((10, 192, 168, 127, chance.randrange(256)))) for _ in range(4)
        )
    groups = [f"{chance.randrange(65536):x}" for _ in range(chance.choice((8, 5, 4)))]
    return (
        ":".join(groups) if len(groups) == 8 else ":".join(groups[:2]) + "::" + ":".join(groups[2:])
    )


def _id(chance: random.Random) -> str:
    return _filled(
        chance,
        chance.choice(
            (
                "###-##-####",
                "###-##-####",
                "### ## ####",
                "#########",
                "@########",
                "@@######@",
                "@@ ## ## ## @",
                "@#######",
                "@@#######",
                "##.###.###",
                "########@",
                "@###-###-##-###-#",
                "@@@#####",
            )
        ),
    )


def _key(chance: random.Random) -> str:
    hexadecimal, letters = "0123456789abcdef", string.ascii_letters + string.digits

    def some(alphabet: str, least: int, most: int) -> str:
        return "".join(chance.choices(alphabet, k=chance.randint(least, most)))

    return chance.choice(
        (
            lambda: "sk-" + some(letters, 20, 48),
            lambda: "sk-proj-" + some(letters + "_-", 20, 40),
            lambda: "ghp_" + some(letters, 36, 36),
            lambda: "AKIA" + some(string.ascii_uppercase + string.digits, 16, 16),
            lambda: some(hexadecimal, 32, 40),
            lambda: some(letters, 16, 40),
            lambda: "xoxb-" + some(string.digits, 11, 12) + "-" + some(letters, 24, 24),
            lambda: "hf_" + some(letters, 34, 34),
            lambda: "eyJ" + some(letters, 20, 30) + "." + some(letters, 20, 40),
            lambda: (
                chance.choice(_WORDS).capitalize()
                + some(string.digits, 2, 4)
                + chance.choice("!#$%&*?")
            ),
            lambda: some(letters + "!#$%&*?", 8, 14),
            lambda: (
                chance.choice(_WORDS)
                + chance.choice("-_.")
                + chance.choice(_WORDS)
                + some(string.digits, 1, 4)
            ),
        )
    )()


def _date(chance: random.Random) -> str:
    day, month, year = (
        chance.randrange(1, 29),
        chance.randrange(1, 13),
        chance.randrange(1930, 2031),
    )
    name = chance.choice(_MONTHS)
    return chance.choice(
        (
            f"{year}-{month:02}-{day:02}",
            f"{day}/{month}/{year}",
            f"{month:02}/{day:02}/{year}",
            f"{day}.{month}.{year}",
            f"{name} {day}, {year}",
            f"{day} {name} {year}",
            f"{name} {year}",
            str(year),
            f"{name} {day}",
            "Monday",
            "tomorrow",
        )
    )


def values_of(words: Sequence[str]) -> Mapping[str, Callable[[random.Random], str]]:
    """Personal data, by kind; ``FIRST`` and ``LAST`` are parts of a person's name.

    Args:
        words: lower-case, of the language, of which some names are made.
    """
    names = Names(words)
    return {
        "PERSON": names.person,
        "FIRST": names.first,
        "LAST": names.last,
        "EMAIL": names.email,
        "PHONE": _phone,
        "CARD": _card,
        "IBAN": _iban,
        "IP": _ip,
        "ADDRESS": names.address,
        "ID": _id,
        "KEY": _key,
    }


FILLERS: Mapping[str, Callable[[random.Random], str]] = {
    "number": lambda chance: chance.choice(
        (
            str(chance.randrange(10 ** chance.randint(1, 6))),
            f"{chance.randrange(1000)}.{chance.randrange(100)}",
            "#" + _digits(chance, 6),
            f"{chance.randrange(1, 999)},{_digits(chance, 3)}",
        )
    ),
    "date": _date,
    "time": lambda chance: chance.choice(
        (
            f"{chance.randrange(24):02}:{chance.randrange(60):02}",
            f"{chance.randrange(1, 13)} pm",
            f"{chance.randrange(24):02}:{chance.randrange(60):02}:{chance.randrange(60):02}",
            "noon",
        )
    ),
    "money": lambda chance: chance.choice(("${}", "{} EUR", "€{}", "{} dollars", "£{}")).format(
        f"{chance.randrange(1, 20000)}" + chance.choice(("", f".{_digits(chance, 2)}"))
    ),
    "word": lambda chance: chance.choice(_WORDS),
    "version": lambda chance: (
        f"{chance.randrange(10)}.{chance.randrange(20)}"
        + chance.choice(("", f".{chance.randrange(30)}"))
    ),
    "isbn": lambda chance: _filled(chance, "978-#-##-######-#"),
    "expiry": lambda chance: f"{chance.randrange(1, 13):02}/{chance.randrange(24, 35)}",
}
"""What looks like it, and is not."""
