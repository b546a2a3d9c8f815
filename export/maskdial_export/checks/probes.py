"""Texts by which two tokenizers are compared: every kind of script, and what is easily mistaken.

A tokenizer may lower-case, strip accents, separate CJK characters, drop controls or fold spaces, or
not; each of these changes the tokens of one of these texts.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

_SENTENCES = (
    "The Quick Brown Fox jumps over the LAZY dog, doesn't it?",
    "Élodie a mangé une crème brûlée à Orléans, près de l'hôtel naïf.",
    "Der Fluß führt über fünf Brücken; die größte heißt LÖWENBRÜCKE.",
    "El niño soñó con un pingüino enorme. ¿Por qué? ¡Quién sabe!",
    "Zażółć gęślą jaźń, Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Iğdır'ın ışığı İSTANBUL'da ılık ve SIĞ görünüyor.",
    "Tiếng Việt có nhiều dấu thanh: ngã, hỏi, nặng, sắc, huyền.",
    "Ða mælte þæt wīf: hwæt sceal ic singan? ǼÞELING",
    "Σήμερα η ΓΆΤΑ κοιμάται πάνω στο τραπέζι του Οδυσσέως.",
    "Ἄνδρα μοι ἔννεπε, Μοῦσα, πολύτροπον, ὃς μάλα πολλὰ πλάγχθη",
    "Привет, МИР! Сегодня идёт дождь, а ёлка зелёная. Її ґанок",
    "שָׁלוֹם עוֹלָם, מה שלומך היום?",
    "مَرْحَبًا بِالعَالَم، كَيْفَ الحَال؟ ـــ ﷺ ﻻ",
    "سلام دنیا، نیم\u200cفاصله می\u200cشود؛ پنجاه و چهار: ۵۴",
    "नमस्ते दुनिया, क्षत्रिय ज्ञान में श्री हैं।",
    "বাংলা ভাষায় যুক্তাক্ষর: ক্ষ, জ্ঞ, ড়",
    "ਸਤ ਸ੍ਰੀ ਅਕਾਲ ਦੁਨੀਆ",
    "ગુજરાતી ભાષા સુંદર છે",
    "தமிழ் மொழி மிகவும் பழமையானது கொ",
    "తెలుగు భాష తియ్యనిది",
    "ಕನ್ನಡ ನುಡಿ ಚೆನ್ನಾಗಿದೆ",
    "മലയാളം എഴുത്ത് ൻ ൽ",
    "සිංහල භාෂාව ක්‍රම",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ น้ำใจ",
    "ພາສາລາວ ບໍ່ມີຍະຫວ່າງ",
    "ភាសាខ្មែរ មានអក្សរច្រើន",
    "မြန်မာဘာသာ စာအုပ်",
    "བོད་ཡིག་གི་སྐད་ཆ།",
    "中文没有空格,但有标点。北京大学生前来应聘",
    "繁體中文:臺灣的圖書館「藏書」很多……",
    "日本語はカタカナとひらがなと漢字が混ざる。ガギグ パピプ",
    "ｶﾞｷﾞｸﾞ ﾊﾟﾋﾟ ＡＢＣ　１２３ ﾃｽﾄ",
    "한국어는 띄어쓰기를 합니다. 각각 값",
    "ქართული ენა ᲥᲐᲠᲗᲣᲚᲘ",
    "Հայերեն լեզուն և ԵՒ",
    "አማርኛ ቋንቋ፡ ሰላም።",
    "ᏣᎳᎩ ꮳꮃꭹ ᠮᠣᠩᠭᠣᠯ ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "ᓀᐦᐃᔭᐍᐏᐣ ߒߞߏ ܣܘܪܝܝܐ ދިވެހި",
    "𐌲𐌿𐍄𐌹𐍃𐌺 𐎀𐎁𐎂 𒀀𒀁 𓀀𓀁 𠀀𠮷野 𝓗𝓮𝓵𝓵𝓸 𝟙𝟚𝟛 𞤀𞤣",
    "ﬁne ﬂow ½ ¾ ² ³ ™ © ® № ℃ Ⅷ ⅷ ① ㈱ ㍿ ㎏ ſ ẞ K Å Ω µ",
    "x² + y² ≤ √2·π ≈ 4.44; ∀ε>0 ∃δ: |f(x)−L| < ε ∑∏∫ 1,234.56 −7e-3",
    "def f(x): return {'a': [1, 2], \"b\": x ** 2}  # comment\n\tpass\n",
    "https://example.org/a/b?c=d&e=%20#f user@mail.com @name #tag C:\\x ../y",
    "$1,000.00 €5 £6 ¥7 ₹8 50% 1st 2nd 10km/h v2.0.1 2024-02-29T12:30:00Z",
    "don't can't it's we're I'll they've y'all 'quoted' \"double\" ‘curly’ “curly” «guillemets»",
    "- a -- b --- c – d — e … f ... g _h_ *i* **j** `k` ~l~ ^m^ <n> [o] {p} (q) |r|",
    "ALLCAPS CamelCase snake_case kebab-case aLtErNaTiNg IJ Ǆ ǅ ǆ",
    "😀 😃👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ❤ 1️⃣ ☎︎ 🧑🏿‍🚀 a👍b",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "e\u0301 o\u0308 a\u030a n\u0303 c\u0327 u\u0308\u0304 \u1112\u1161\u11ab q\u0323\u0307",
)
_CONTROLS = "\x01\x07\x08\x0b\x0c\x1b\x1f\x7f\x80\x85\x9f\xad"
_INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202e\u2060\u2066\ufe0f\ufeff\ufffc\ufffd"
_UNASSIGNED = "\ue000\uf8ff\u0378\ufdd0\uffff\U0003fffd\U000e0041\U0010ffff"
_SPACES = "\t\n\r\xa0\u1680\u2003\u2009\u202f\u205f\u3000\u180e"
_BLANK = (
    "",
    " ",
    "   ",
    "\n",
    "\t\t",
    "\r\n\r\n",
    "\xa0\u3000",
    " a",
    "a ",
    "  a  b  ",
    "a\nb\r\nc\td",
    "\na\n\n\nb\n",
    "a     b          c",
    "a\x00b",
    ">>xyz<< Hello",  # Marian's language codes
    "a >>deu<< b >><<",
)
_MAX_TOKENS = 40  # of the tokenizer's own that are tried, spread over all
_MAX_WORDS = 40
_LONG = 1200  # characters; the server tokenizes longer texts in another way


def probes(added: Sequence[str], vocabulary: Sequence[str], own: Iterable[str]) -> list[str]:
    """Some 300 texts.

    Args:
        added: the tokenizer's tokens that are matched in texts, special ones among them.
        vocabulary: its others.
        own: sentences of the kind that the model reads.
    """
    texts = [*_written_otherwise(), *_characters(), *_BLANK, *_long()]
    texts += _with_tokens(_spread(added, _MAX_TOKENS))
    texts += _spread(vocabulary, _MAX_WORDS)
    texts += _spread(list(own), _MAX_WORDS)
    return list(dict.fromkeys(texts))


def pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Some of the texts with others, neither of them empty."""
    full = [text for text in texts if text.strip()]
    return list(zip(full[::7], full[3::7], strict=False))


def _written_otherwise() -> Iterator[str]:
    for sentence in _SENTENCES:
        yield sentence
        yield unicodedata.normalize("NFD", sentence)
        yield unicodedata.normalize("NFKC", sentence).upper()
        yield sentence.replace(" ", "")[:60].lower()


def _characters() -> Iterator[str]:
    for characters in (_CONTROLS, _INVISIBLE, _UNASSIGNED, _SPACES):
        yield characters
        yield "a".join(characters)
        yield from (f"Ab{each}cD {each} é" for each in characters)


def _long() -> Iterator[str]:
    for length in (99, 100, 101, 250):  # WordPiece gives up on words of more than 100 characters
        yield f"{'a' * length} b"
        yield "é" * length
    together = " ".join(_SENTENCES)
    yield together[:_LONG]
    yield together
    yield " word" * _LONG


def _with_tokens(tokens: Iterable[str]) -> Iterator[str]:
    for index, token in enumerate(tokens):
        yield f"a {token} b"
        if index % 4 == 0:
            yield token
            yield f"x{token}y{token}{token} z"
            yield f"  {token}  {token.lower()} {token.upper()}\n{token}"


def _spread(items: Sequence[str], max_items: int) -> list[str]:
    """As many items as ``max_items``, evenly spread, the first and the last among them."""
    if len(items) <= max_items:
        return list(items)
    return [items[round(index * (len(items) - 1) / (max_items - 1))] for index in range(max_items)]
