"""The first error of a failed capture, with its CUDA code: what comes after only says that the capture is invalid."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsv4lab.files import without_folders

CODES = {
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    902: ("cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"),
    903: ("cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    906: (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream",
    ),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
    908: (
        "cudaErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread",
    ),
}
"""Code -> name and text of CUDA 13's errors of stream capture (driver_types.h). Triton gives the text alone."""


@dataclass(frozen=True)
class FirstError:
    """What ended a capture. `code` and `name` are CUDA's; both None where Python refused before CUDA did."""

    text: str
    code: int | None
    name: str | None


def first_error(error: BaseException) -> FirstError:
    """The earliest error behind `error` that is about capture; else what the innermost explicit cause says."""
    chain = list(_behind(error))
    about = [each for each in chain if _code(each) is not None or "captur" in str(each).lower()]
    first = about[-1] if about else _cause(error)
    code = _code(first)
    line = next((line for line in str(first).splitlines() if line.strip()), "")
    text = without_folders(f"{type(first).__name__}: {line}".strip())
    return FirstError(text, code, CODES[code][0] if code in CODES else _name(str(first)))


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, then what it came from, back to the earliest."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = _explicit(error) or (None if error.__suppress_context__ else error.__context__)


def _cause(error: BaseException) -> BaseException:
    while (earlier := _explicit(error)) is not None:
        error = earlier
    return error


def _explicit(error: BaseException) -> BaseException | None:
    """What `error` names as its cause; Dynamo keeps what its backend raised in a field, and raises `from None`."""
    return error.__cause__ or getattr(error, "inner_exception", None)


def _code(error: BaseException) -> int | None:
    text = str(error)
    for code, (name, meaning) in CODES.items():
        if name in text or meaning in text:
            return code
    return getattr(error, "error_code", None)


def _name(text: str) -> str | None:
    found = re.search(r"\bcudaError\w+", text)
    return found and found[0]
