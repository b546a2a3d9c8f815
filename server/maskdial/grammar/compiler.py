"""GrammarCompiler: from a request's grammar to the masks that constrain its texts."""

import hashlib
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from maskdial.bundle.bundle import Bundle
from maskdial.engine.fairness import Shares, current_usage
from maskdial.errors import OverloadedError, UnavailableError, ValidationError
from maskdial.grammar.build import build_matcher
from maskdial.grammar.check import GrammarChecker, TooComplexError
from maskdial.grammar.masks import MaskThreads
from maskdial.grammar.matcher import Grammar
from maskdial.grammar.memory import GrammarMemory, Hold
from maskdial.grammar.schema import ONE_OF_WARNING
from maskdial.grammar.source import GrammarKind, GrammarValue, grammar_error, parse_grammar
from maskdial.grammar.vocabulary import Vocabulary

_MAX_VERDICTS = 1024
_MAX_SECONDS_TOO_COMPLEX = 60.0
_MAX_COMPILING = 256  # different grammars
_MAX_COMPILING_PER_CLIENT = 32
_NUM_MASK_THREADS = 2


class Checker(Protocol):
    """What the compiler needs of `maskdial.grammar.check.GrammarChecker`."""

    def check(self, grammar: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A grammar to compile, its hash, whose it is, and what becomes of it.

    ``owner`` is the name of the request's key.
    """

    kind: GrammarKind
    value: GrammarValue
    key: bytes
    client: str
    owner: str
    hold: Hold
    grammar: Future[Grammar] = field(default_factory=Future)


class GrammarCompiler:
    """Turns grammars into `Grammar` for one model. Thread-safe.

    Each new grammar is tried in a child process first, and the verdict is cached, for each key
    apart: how fast a grammar is compiled would tell others whether they guessed it. The compiled
    grammar is not: llguidance's copies share a lexer that grows with use up to a limit, so one
    request could make another's grammar fail.

    Args:
        tokenizer_json: the content of the model's ``tokenizer.json``.
        vocab_size: the width of the model's logits; it may exceed the tokenizer's vocabulary.
        eos_token_ids: the model's end-of-sequence tokens, possibly none.
        checker: tries the grammars. Default: a `GrammarChecker`.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        checker: Checker | None = None,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._checker = checker or GrammarChecker(tokenizer_json, self._eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        # By the hash of a key's name and a grammar's text; oldest use first.
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        # A single thread, so that hostile grammars take one core at most and no other pool's.
        self._compiling = ThreadPoolExecutor(1, "maskdial-grammar-compile")
        self._masking = MaskThreads(_NUM_MASK_THREADS)
        self._lock = threading.Lock()
        self._pending: dict[str, deque[_Job]] = {}  # by client; none is empty
        self._memory = GrammarMemory()
        self._shares = Shares()  # of the thread's seconds
        # How many requests of each client wait for each grammar, by its hash.
        self._waiting: Counter[tuple[str, bytes]] = Counter()

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> "GrammarCompiler":
        """For the tokens of a bundle's model."""
        return cls(
            bundle.tokenizer.read_text(encoding="utf-8"),
            vocab_size=bundle.manifest.vocab_size,
            eos_token_ids=bundle.manifest.special_tokens.eos,
        )

    @property
    def num_compiling(self) -> int:
        """Different grammars that are being compiled, or wait for it."""
        return len({key for _, key in self._waiting})

    @property
    def num_bytes(self) -> int:
        """Of the grammars that wait or are in use."""
        return self._memory.num_bytes

    def submit(self, kind: GrammarKind, value: GrammarValue) -> "Future[Grammar]":
        """Compiles a grammar on another thread; await it with ``asyncio.wrap_future``.

        Args:
            kind: what ``value`` is.
            value: see `parse_grammar`.

        Returns:
            The grammar to come. It fails with `ValidationError` if the value is no grammar of that
            kind, or is too large or too complex.

        Raises:
            UnavailableError: too many masks never ended.
            OverloadedError: too many other grammars wait to be compiled, of this client or in all.
                A grammar that waits already is no burden: only the first of its kind has to be
                checked. Or the grammars that wait or are in use are too large; see `GrammarMemory`.
        """
        if self._masking.exhausted:
            raise UnavailableError(
                "constrained output is switched off until the server is restarted: the masks of "
                "several grammars took too long"
            )
        usage, (key, num_bytes) = current_usage(), _hash(kind, value)
        hold = self._memory.hold(usage.client, num_bytes, unlimited=usage.unlimited)
        job = _Job(kind, value, key, usage.client, usage.key, hold)
        with self._lock:
            if not usage.unlimited:
                self._check_room(job)
            if job.client not in self._pending:
                self._shares.join(job.client, self._pending)
                self._pending[job.client] = deque()
            self._pending[job.client].append(job)
            self._waiting[job.client, job.key] += 1
        # Not the job, which would be a cycle with its own callback, and keep the grammar's memory.
        job.grammar.add_done_callback(partial(self._count_down, job.client, job.key))
        self._compiling.submit(self._work)
        return job.grammar

    def close(self) -> None:
        """Ends the threads and the child process; no mask can be prepared afterwards."""
        self._compiling.shutdown(cancel_futures=True)
        for job in [job for jobs in self._pending.values() for job in jobs]:
            job.grammar.cancel()
        self._masking.close()
        self._checker.close()

    def _check_room(self, job: "_Job") -> None:
        if self._waiting[job.client, job.key]:
            return
        of_client = sum(client == job.client for client, _ in self._waiting)
        if of_client >= _MAX_COMPILING_PER_CLIENT or self.num_compiling >= _MAX_COMPILING:
            raise OverloadedError(
                f"{of_client} other grammars of this client, and {self.num_compiling} in all, wait "
                "to be compiled already; try again in a moment"
            )

    def _count_down(self, client: str, key: bytes, _: "Future[Grammar]") -> None:
        with self._lock:
            self._waiting[client, key] -= 1
            if not self._waiting[client, key]:
                del self._waiting[client, key]

    def _work(self) -> None:
        """Compiles the next grammar of the client whose turn it is."""
        with self._lock:
            client = self._shares.first(self._pending)
            job = self._pending[client].popleft()
            if not self._pending[client]:
                del self._pending[client]
        started = time.monotonic()
        if job.grammar.set_running_or_notify_cancel():
            grammar, error = self._try(job.kind, job.value, job.owner, job.hold)
            if grammar is not None:
                job.grammar.set_result(grammar)
            else:
                job.grammar.set_exception(error)
            # An error's traceback leads to this frame, which would lead to the error's future.
            del grammar, error
        del job
        with self._lock:
            self._shares.charge(client, time.monotonic() - started)
            self._shares.prune(self._pending)

    def _try(
        self, kind: GrammarKind, value: GrammarValue, owner: str, hold: Hold
    ) -> tuple[Grammar, None] | tuple[None, Exception]:
        """The grammar, or why there is none. An error's traceback does not lead to the job."""
        try:
            return self._compile(kind, value, owner, hold), None
        except Exception as error:
            return None, error

    def _compile(self, kind: GrammarKind, value: GrammarValue, owner: str, hold: Hold) -> Grammar:
        source = parse_grammar(kind, value)
        if self._vocabulary is None:
            # Takes some tenths of a second, so not before a request needs it.
            self._vocabulary = Vocabulary(
                self._tokenizer_json, self._vocab_size, self._eos_token_ids
            )
        self._check(source.text, owner)
        vocabulary = self._vocabulary
        matcher, mask = build_matcher(vocabulary.tokens, source.text)
        # Only grammars written by the server may contain special tokens: the tags of tool calls.
        with_special = kind == "structural"
        starts = (
            vocabulary.unpack(mask, first=first, with_special=with_special)
            for first in (False, True)
        )
        if not any(map(vocabulary.has_text, starts)):
            raise grammar_error("no text of this model matches it, or only the empty one")
        warnings = [*source.warnings]
        if any("oneOf" in warning for warning in matcher.get_grammar_warnings()):
            warnings.append(ONE_OF_WARNING)
        return Grammar(
            matcher,
            mask,
            vocabulary,
            self._masking,
            with_special=with_special,
            warnings=warnings,
            hold=hold,
        )

    def _check(self, source: str, owner: str) -> None:
        # The names of keys have no NUL.
        key = hashlib.sha256(f"{owner}\0{source}".encode()).digest()
        verdict = self._verdicts.pop(key, None)
        if verdict is None or verdict.expires < time.monotonic():
            verdict = self._judge(source)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if verdict.error is not None:
            raise ValidationError(verdict.error)

    def _judge(self, source: str) -> "_Verdict":
        try:
            self._checker.check(source)
        except TooComplexError as error:
            # The child may have died of something else, or have been slow once.
            return _Verdict(error.message, expires=time.monotonic() + _MAX_SECONDS_TOO_COMPLEX)
        except ValidationError as error:
            return _Verdict(error.message)
        return _Verdict(None)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is wrong with a grammar, if anything is, and how long that is held to be true."""

    error: str | None
    expires: float = math.inf


def _hash(kind: GrammarKind, value: GrammarValue) -> tuple[bytes, int]:
    """A grammar's hash, and about how many bytes its text has."""
    try:
        text = f"{kind} {value!r}"
    except RecursionError:
        text = ""  # so deep that it will be refused as soon as it is read
    content = text.encode(errors="surrogatepass")
    return hashlib.sha256(content).digest(), len(content)
