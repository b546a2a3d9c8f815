"""Roles: conversations in the order of roles that a chat template takes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

_PROBE, _FIRST = "Zsystemz", "Zfirstz"
# Words of their own, as a template may write out some messages of a role and not others.
_USER, _ANSWER, _SECOND, _RESULT = "Zuserz", "Zanswerz", "Zsecondz", "Zresultz"
_ID, _OTHER = "zcall1234", "zcall5678"  # as Mistral's templates want it: nine letters and digits


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What a template takes.

    Attributes:
        system: whether it takes a system message at the beginning.
        system_with_result: whether it writes that where a result is the last message.
        later_system: whether it takes one elsewhere.
        repeated_user: whether a user's message may follow another one.
        results: whether it writes the result of a call.
        other_results: whether it does so where the call has another id.
        stray_results: whether it does so where the call is not there.
    """

    system: bool = True
    system_with_result: bool = True
    later_system: bool = True
    repeated_user: bool = True
    results: bool = True
    other_results: bool = True
    stray_results: bool = True

    @classmethod
    def learned(cls, render: Callable[[Sequence[Message]], str]) -> "RoleRules":
        """Those of a template, by what it does with short conversations.

        Args:
            render: the prompt of a conversation; empty where the template fails.
        """

        def takes(*messages: Message) -> bool:
            text = render(messages)
            return all(each["content"] in text for each in messages)

        user, answer, second = (
            _said("user", _USER),
            _said("assistant", _ANSWER),
            _said("user", _SECOND),
        )
        probe, result = _said("system", _PROBE), {**_said("tool", _RESULT), "tool_call_id": _ID}
        if not takes(user, answer, second):
            return cls()  # it fails on everything, or reads no text: its errors say why
        system = takes(probe, user)
        later = takes(user, probe) and takes(user, probe, answer, second)
        if system and later:  # DeepSeek R1's template writes the last one alone
            later = takes(_said("system", _FIRST), user, answer, probe, second)
        calls, other = (_called({"z": 1}), _called('{"z": 1}')), {**result, "tool_call_id": _OTHER}
        results = any(takes(user, call, result) for call in calls)
        return cls(
            system,
            not (system and results) or any(takes(probe, user, call, result) for call in calls),
            later,
            takes(user, second),
            results,
            any(takes(user, call, other) for call in calls),
            # Kimi K2's template writes these alone here: its calls, which it keeps in a list that
            # it changes, are within the content.
            takes(user, answer, result) and takes(user, result, second),
        )

    def applied(self, messages: Iterable[Message]) -> list[Message]:
        """The conversation as the template takes it.

        System messages at the beginning become one. Those that the template does not take become
        part of the message before them, of a user or a tool, or else of the next one of a user: not
        of the first one, as prompts of later turns would not begin alike. Results of calls that it
        does not take are a user's messages.
        """
        if not self.system_with_result:
            messages = _in_last_users([*messages])
        kept: list[_Kept] = []
        held: list[Message] = []  # between calls and their results, which stay together
        leads, asked, calls = True, set[str](), list[str]()  # ids of all calls, of the last turn's
        for each in messages:
            if each.get("role") not in {"tool", "system"}:
                calls = [call["id"] for call in each.get("tool_calls") or ()]
                asked.update(calls)
            message = each
            if each.get("role") == "tool" and not self._writes(each, asked, follows=bool(calls)):
                message = _said("user", each["content"])
            role, before = message.get("role"), kept[-1] if kept else None
            if role != "system":
                leads = False
                if role != "tool":
                    _fold(held, kept)
            if role == "system":
                if leads and before is not None and self.system:
                    before.add(message)
                elif self.system if leads else self.later_system:
                    kept.append(_Kept(message))
                elif before is not None and before.message.get("tool_calls"):
                    held.append(message)
                else:
                    _fold([message], kept)
            elif (
                role == "user"
                and kept
                and kept[-1].is_users
                and (kept[-1].folded or not self.repeated_user)
            ):
                kept[-1].add(message)
                kept[-1].folded = False
            else:
                kept.append(_Kept(message))
        _fold(held, kept)
        return [each.joined() for each in kept]

    def _writes(self, result: Message, asked: Collection[str], *, follows: bool) -> bool:
        """Whether the template writes a result.

        ``asked`` are the ids of the calls before it; ``follows``: some are those of its turn.
        """
        if result.get("tool_call_id") in asked:
            return self.results
        return self.other_results if follows else self.stray_results


def _in_last_users(messages: list[Message]) -> list[Message]:
    """System messages at the beginning within the user's last message, if a result is the last.

    The templates of Mistral 7B v0.3 and Nemo write them into the last message if that is a user's,
    and Mistral's own code (mistral-common) into the user's last one.
    """
    count = next((at for at, each in enumerate(messages) if each.get("role") != "system"), 0)
    places = [at for at, each in enumerate(messages) if each.get("role") == "user"]
    if not count or not places or messages[-1].get("role") != "tool":
        return messages
    texts = [each["content"] for each in (*messages[:count], messages[places[-1]])]
    found = {**messages[places[-1]], "content": "\n\n".join(filter(None, texts))}
    return [*messages[count : places[-1]], found, *messages[places[-1] + 1 :]]


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _called(arguments: object) -> Message:
    function = {"name": "zname", "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    return {**_said("assistant", ""), "tool_calls": [call]}


class _Kept:
    """A message, and what became part of it.

    Attributes:
        message: the first of them.
        folded: whether it is a system message in a user's place, which the user's next one joins.
    """

    def __init__(self, message: Message, *, folded: bool = False) -> None:
        self.message = message
        self.folded = folded
        self._added: list[Message] = []

    @property
    def is_users(self) -> bool:
        return self.message.get("role") == "user"

    def add(self, message: Message) -> None:
        self._added.append(message)

    def joined(self) -> Message:
        if not self._added:
            return self.message
        texts = [text for each in (self.message, *self._added) if (text := each["content"])]
        return {**self.message, "content": "\n\n".join(texts)}


def _fold(systems: list[Message], kept: list[_Kept]) -> None:
    """Makes system messages part of the last one, or of the user's next one, and forgets them."""
    for message in systems:
        if kept and kept[-1].message.get("role") in ("user", "tool"):
            kept[-1].add(message)
        else:
            kept.append(_Kept({**message, "role": "user"}, folded=True))
    systems.clear()
