"""Validation of an input file, which is refused as a whole, before any of its lines is answered."""

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass, field

from maskdial.batches.answers import DUPLICATE, Answers
from maskdial.batches.jobs import LineError
from maskdial.batches.lines import Input, Line

_MAX_ERRORS = 100
_LINES_PER_PAUSE = 16
_PAUSE_SECONDS = 0.0005


class _StoppedError(Exception):
    """Nobody waits for what is found any more."""


@dataclass(slots=True)
class Findings:
    """What an input file is like.

    Attributes:
        num_lines: without blank ones.
        first: the number of the first line.
        model: that of all lines; None: they name none, or several.
        errors: the first hundred.
    """

    num_lines: int = 0
    first: int | None = None
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)


def validate(
    lines: Input,
    answers: Answers,
    endpoint: str,
    stop: threading.Event,
    *,
    mixes_models: bool = False,
) -> Findings:
    """Reads a file to its end, or to its hundredth error, with pauses, in which another thread gets
    the interpreter at once.

    Args:
        lines: the file.
        answers: would answer them.
        endpoint: the path that all lines are for.
        stop: ends the reading.
        mixes_models: whether the lines may name different models.
    """
    found = Findings()
    pauses = itertools.cycle((*[0.0] * (_LINES_PER_PAUSE - 1), _PAUSE_SECONDS))

    def pause() -> None:
        if stop.is_set():
            raise _StoppedError
        if seconds := next(pauses):
            time.sleep(seconds)

    lines.before_line = pause
    with contextlib.suppress(_StoppedError):
        for line in lines:
            found.num_lines += 1
            error = _error_of(line, answers, endpoint, found, mixes_models=mixes_models)
            if error is not None:
                found.errors.append(error)
                if len(found.errors) == _MAX_ERRORS:
                    return found
    if not found.num_lines:
        found.errors.append(_error("empty_file", None, "the file has no requests"))
    return found


def _error_of(
    line: Line, answers: Answers, endpoint: str, found: Findings, *, mixes_models: bool
) -> LineError | None:
    if line.fault:
        return _error("invalid_json_line", line.number, line.fault)
    if "custom_id" not in line.content:
        why = 'custom_id: the line has no "custom_id", "method", "url" and "body"'
        return _error("missing_required_parameter", line.number, why, "custom_id")
    if fault := answers.fault_of(line):
        code = "duplicate_custom_id" if fault == DUPLICATE else "invalid_request"
        return _error(code, line.number, fault)
    if line.content["url"] != endpoint:
        why = f"url must be the batch's endpoint, {endpoint}"
        return _error("mismatched_endpoint", line.number, why, "url")
    model = line.content["body"].get("model")
    if found.first is None:
        found.first = line.number
        found.model = model if isinstance(model, str) else None
    elif model != found.model and mixes_models:
        found.model = None
    elif model != found.model:
        why = "body.model must be the same in all lines of a batch"
        return _error("mismatched_model", line.number, why, "body.model")
    return None


def _error(code: str, line: int | None, message: str, param: str | None = None) -> LineError:
    return {"code": code, "line": line, "message": message, "param": param}
