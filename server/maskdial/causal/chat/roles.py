"""Roles: conversations in the order of roles that a chat template takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

_PROBE = "Zsystemz"
# Words of their own, as a template may write out some messages of a role and not others.
_USER, _ANSWER, _SECOND = "Zuserz", "Zanswerz", "Zsecondz"


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What a template takes.

    Attributes:
        system: whether it takes a system message at the beginning.
        later_system: whether it takes one elsewhere.
        repeated_user: whether a user's message may follow another one.
    """

    system: bool = True
    later_system: bool = True
    repeated_user: bool = True

    @classmethod
    def learned(cls, render: Callable[[Sequence[Message]], str]) -> "RoleRules":
        """Those of a template, by what it does with short conversations.

        Args:
            render: the prompt of a conversation; empty where the template fails.
        """

        def takes(*messages: tuple[str, str]) -> bool:
            text = render([{"role": role, "content": content} for role, content in messages])
            return all(content in text for _, content in messages)

        user, answer, second = ("user", _USER), ("assistant", _ANSWER), ("user", _SECOND)
        probe = ("system", _PROBE)
        if not takes(user, answer, second):
            return cls()  # it fails on everything, or reads no text: its errors say why
        system = takes(probe, user)
        return cls(
            system,
            takes(user, probe) and takes(user, probe, answer, second),
            takes(user, second),
        )

    def applied(self, messages: Iterable[Message]) -> list[Message]:
        """The conversation as the template takes it.

        System messages at the beginning become one. Those that the template does not take become
        part of the message before them, of a user or a tool, or else of the next one of a user: not
        of the first one, as prompts of later turns would not begin alike.
        """
        kept: list[Message] = []
        for message in messages:
            before = kept[-1] if kept else None
            role = message.get("role")
            if role == "system":
                leads = all(each.get("role") == "system" for each in kept)
                if leads and before is not None and self.system:
                    kept[-1] = _joined(before, message)
                elif self.system if leads else self.later_system:
                    kept.append(message)
                elif before is not None and before.get("role") in ("user", "tool"):
                    folded = {_FOLDED: True} if _FOLDED in before else {}
                    kept[-1] = {**_joined(before, message), **folded}
                else:
                    kept.append({**message, "role": "user", _FOLDED: True})
            elif (
                role == "user"
                and before is not None
                and before.get("role") == "user"
                and (_FOLDED in before or not self.repeated_user)
            ):
                kept[-1] = _joined(before, message)
            else:
                kept.append(message)
        return [{name: each[name] for name in each if name != _FOLDED} for each in kept]


_FOLDED = "folded"


def _joined(before: Message, after: Message) -> Message:
    texts = [text for each in (before, after) if (text := each["content"])]
    joined = {**before, "content": "\n\n".join(texts)}
    return {name: joined[name] for name in joined if name != _FOLDED}
