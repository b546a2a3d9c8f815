"""Verdict: what is wrong with one reply, by its receipt and by asking the model again."""

from dataclasses import dataclass
from typing import Literal

from maskdial.batches.answers import json_of, sentence_of
from maskdial.errors import shortened
from maskdial.http.in_process import Reply
from maskdial.offline.application import Application
from maskdial.offline.verify.entries import Entry, receipt_of_stream
from maskdial.receipts.content import reply_sha256, request_sha256
from maskdial.receipts.receipt import HEADER, ReadReceipt, Receipt, ReceiptError, read_receipt
from maskdial.receipts.signing import PublicKey

Fault = Literal[
    "line",
    "receipt",
    "signature",
    "request",
    "seed",
    "reply",
    "bundle",
    "numerics",
    "settings",
    "output",
    "unseeded",
    "failed",
]
"""What can be wrong: the line itself; its receipt, or the signature; what was changed since; what
is otherwise here; what the model answers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with a sentence about it."""

    fault: Fault
    why: str


class Judge:
    """Says what is wrong with entries of a log.

    Args:
        application: has the models; None: nothing is asked again.
        key: has to have signed every receipt; None if that does not matter.
    """

    def __init__(self, application: Application | None, key: PublicKey | None) -> None:
        self._application = application
        self._key = key

    async def judge(self, entry: Entry) -> list[Finding]:
        """What is wrong with an entry; nothing if its reply is the model's."""
        if not entry.receipt:
            if self._key is not None or self._application is None:
                return [Finding("receipt", "the reply has no receipt")]
            return await _without_receipt(entry, self._application)
        try:
            read = read_receipt(entry.receipt)
        except ReceiptError as error:
            return [Finding("receipt", str(error))]
        found = self._signature(read)
        told = read.receipt
        if reply_sha256(entry.reply) != told.reply:
            found.append(Finding("reply", "the reply is not the one that the receipt was made for"))
        is_asked = request_sha256(entry.path, entry.body, told.seed) == told.request
        if self._application is None:
            if not is_asked:
                why = "the request, or its seed, is not the one that the receipt was made for"
                found.append(Finding("request", why))
            return found
        return found + await _repeated(entry, told, self._application, is_asked=is_asked)

    def _signature(self, read: ReadReceipt) -> list[Finding]:
        if self._key is None or read.is_signed_by(self._key):
            return []
        if not read.key_id:
            return [Finding("signature", "the receipt is not signed")]
        if read.key_id != self._key.id:
            why = f"the receipt is signed by another key, {shortened(read.key_id)}"
            return [Finding("signature", f"{why}, not {self._key.id}")]
        return [Finding("signature", "the receipt was changed since it was signed")]


async def _repeated(
    entry: Entry, told: Receipt, application: Application, *, is_asked: bool
) -> list[Finding]:
    """What is wrong by asking again with the receipt's seed."""
    here = application.bundles
    if here and not {each.partition("/")[0] for each in told.bundle.split("+")} <= here:
        return [Finding("bundle", f"the receipt is of another bundle, {_shown(told.bundle)}")]
    reply = await application.repeat(entry.path, entry.body, told.seed)
    written = reply.headers.get(HEADER) or receipt_of_stream(reply.body.decode(errors="replace"))
    if reply.status != 200 or not written:
        return [_failed(reply)]
    again = read_receipt(written).receipt
    if again.bundle != told.bundle:
        why = f"the receipt is of bundle {_shown(told.bundle)}; {_shown(again.bundle)} answers here"
        return [Finding("bundle", why)]
    if again.numerics != told.numerics:
        why = f"the receipt is of numerics {shortened(told.numerics)!r}, maskdial "
        why += f"{shortened(told.server)}; here they are {again.numerics!r}"
        return [Finding("numerics", why)]
    is_same = again.reply == told.reply
    if not is_asked:
        if again.asked == told.asked and not is_same:
            why = "the seed is not the one that the receipt was made for"
            return [Finding("seed", why)]
        return [Finding("request", "the request is not the one that the receipt was made for")]
    if again.asked != told.asked:
        why = "settings of the server changed what the model was asked, such as its defaults or "
        return [Finding("settings", f"{why}the truncation of texts; give them by --config")]
    if is_same:
        return []
    why = "the model answers otherwise"
    return [Finding("output", why if told.numerics else f"{why}, and promises no equal bits here")]


async def _without_receipt(entry: Entry, application: Application) -> list[Finding]:
    """What is wrong by asking again, where nothing tells the seed."""
    replies = [await application.repeat(entry.path, entry.body, None)]
    told = reply_sha256(entry.reply)
    if reply_sha256(replies[0].body) == told:
        return []
    if replies[0].status != 200:
        return [_failed(replies[0])]
    replies.append(await application.repeat(entry.path, entry.body, None))
    first, second = (reply_sha256(reply.body) for reply in replies)
    return [differs(is_drawn=first != second)]


def differs(*, is_drawn: bool) -> Finding:
    """That a model answers otherwise than a reply without a receipt says.

    Args:
        is_drawn: whether it also answers otherwise each time.
    """
    if is_drawn:
        why = "the reply was drawn with a seed that neither the request nor a receipt tells"
        return Finding("unseeded", why)
    return Finding("output", "the model answers otherwise")


def _failed(reply: Reply) -> Finding:
    why = shortened(sentence_of(json_of(reply.body)), 300)
    return Finding("failed", f"the request gets no answer here: {why}")


def _shown(bundle: str) -> str:
    """Enough of the hashes of a bundle, or of several, to tell them from others."""
    return shortened("+".join(shortened(each, 16) for each in bundle.split("+")), 100)
