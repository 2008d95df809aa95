"""The verdicts: what a notebook says of itself, what its run says of it, and the report that holds them all."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from dsv4lab.files import write_atomically

RESULT_VARIABLE = "DSV4LAB_RESULT"
"""Names the file that `finish` and `skip` write. Set by the runner alone: elsewhere nothing is written."""

Verdict = Literal["passed", "failed", "died", "timed out", "skipped", "interrupted", "not run"]
GOOD: tuple[Verdict, ...] = ("passed", "skipped")


class UsageError(ValueError):
    """The user asked for what cannot be done; the message is one line that names it."""


class Skipped(Exception):
    """Stops a notebook that said why; shown as that one line, not as a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython's protocol
        return [f"skipped: {self}"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Claim(_Frozen):
    text: str
    holds: bool
    evidence: str


class Result(_Frozen):
    """Written by the notebook. `answer` is its one line, or why it was skipped."""

    verdict: Literal["passed", "failed", "skipped"]
    answer: str
    claims: tuple[Claim, ...] = ()


class Outcome(_Frozen):
    """One notebook of a batch. `parameters` are the values in effect; `detail` says what went wrong and where."""

    notebook: str
    verdict: Verdict
    seconds: float = 0.0
    parameters: dict[str, Any] = {}
    answer: str = ""
    detail: str = ""
    claims: tuple[Claim, ...] = ()
    pages: tuple[str, ...] = ()
    """Files beside the report: the executed notebook and its HTML."""

    @property
    def minutes(self) -> float:
        return self.seconds / 60


class Report(_Frozen):
    schema_version: int = 1
    mode: Literal["live", "recorded"]
    device: str
    date_utc: str
    versions: dict[str, str]
    outcomes: tuple[Outcome, ...]

    @property
    def good(self) -> bool:
        return all(outcome.verdict in GOOD for outcome in self.outcomes)


def finish(answer: str, claims: Iterable[tuple[str, bool, str]]) -> None:
    """Closes a notebook: the last line of its last cell.

    Args:
        answer: the chapter's answer in one sentence, with its number.
        claims: (what is claimed, whether it holds, the evidence), at least one.

    Raises:
        AssertionError: naming the claims that do not hold, after all of them were printed and recorded.
        ValueError: no answer or no claim.
    """
    checked = tuple(Claim(text=text, holds=bool(holds), evidence=evidence) for text, holds, evidence in claims)
    if not answer.strip():
        raise ValueError(f"answer must be a sentence, got {answer!r}")
    if not checked:
        raise ValueError("claims must hold at least one (text, holds, evidence), got none")
    for claim in checked:
        print(f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text} ({claim.evidence})")
    broken = [claim.text for claim in checked if not claim.holds]
    _record(Result(verdict="failed" if broken else "passed", answer=answer, claims=checked))
    if broken:
        raise AssertionError(f"{len(broken)} of {len(checked)} claims do not hold: {'; '.join(broken)}")


def skip(reason: str) -> NoReturn:
    """Ends a notebook that cannot go on here ("no GPU"): a recorded verdict, neither a success nor a failure."""
    _record(Result(verdict="skipped", answer=reason))
    raise Skipped(reason)


def _record(result: Result) -> None:
    if path := os.environ.get(RESULT_VARIABLE):
        write_atomically(Path(path), result.model_dump_json())
