"""Which family each kernel belongs to: a table of rules that anyone can read and extend (`families.toml`)."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dsv4lab.trace.frames import Trace

TABLE = Path(__file__).with_name("families.toml")
OTHER = "other"
COMMUNICATION = ("nccl", "collective")
_FIELDS = ("kernel", "op", "kind")


@dataclass(frozen=True)
class Rule:
    """All given patterns must be found: `kernel` in the name, `op` in the launching op or one around it."""

    family: str
    kernel: re.Pattern[str] | None = None
    op: re.Pattern[str] | None = None
    kind: str = ""

    def fits(self, kind: str, name: str, ops: Sequence[str]) -> bool:
        return (
            self.kind in ("", kind)
            and (self.kernel is None or bool(self.kernel.search(name)))
            and (self.op is None or any(self.op.search(op) for op in ops))
        )


@dataclass(frozen=True)
class Families:
    """The rules in order, and the families' titles in the order of tables and figures."""

    rules: tuple[Rule, ...]
    titles: dict[str, str]

    def of(self, kind: str, name: str, op: str = "", parents: str = "") -> str:
        ops = [each for each in (op, *parents.split(" < ")) if each]
        return next((rule.family for rule in self.rules if rule.fits(kind, name, ops)), OTHER)


def load(rules: Path | None = None) -> Families:
    """The table of the package, with the rules of a file before it; ValueError naming what is wrong in that file."""
    ours = _parsed(TABLE)
    if rules is None:
        return ours
    theirs = _parsed(rules, known=ours.titles)
    return Families(theirs.rules + ours.rules, {**theirs.titles, **ours.titles})


def _parsed(path: Path, known: dict[str, str] | None = None) -> Families:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"rules {path.name}: {error}") from error
    titles = table.get("families", {})
    rules = []
    for number, entry in enumerate(table.get("rule", []), 1):
        where = f"rules {path.name}, rule {number}"
        if entry.get("family") not in titles | (known or {}):
            raise ValueError(f"{where}: family {entry.get('family')!r} is not among the families")
        if entry.keys() - {"family", *_FIELDS} or not entry.keys() & set(_FIELDS):
            raise ValueError(f"{where}: must give family and some of {', '.join(_FIELDS)}, got {', '.join(entry)}")
        try:
            patterns = {name: re.compile(entry[name]) for name in ("kernel", "op") if name in entry}
        except re.error as error:
            raise ValueError(f"{where}: {error}") from error
        rules.append(Rule(entry["family"], kind=entry.get("kind", ""), **patterns))
    return Families(tuple(rules), titles)


def classified(trace: Trace, families: Families | None = None) -> Trace:
    """The trace with a column `family`, its categories in the order of the table."""
    families = families or load()
    columns = [trace.events[name] for name in ("kind", "name", "op", "parents")]
    group = pd.DataFrame({column.name: column.cat.codes for column in columns}).groupby(
        [column.name for column in columns], sort=False
    )
    firsts = group.head(1).index
    found = [families.of(*("" if text is None else text for text in row)) for row in _texts(columns, firsts)]
    codes = np.array([list(families.titles).index(family) for family in found], dtype=np.int8)
    family = pd.Categorical.from_codes(codes[group.ngroup()], categories=list(families.titles))
    return trace.with_events(family=family)


def _texts(columns: Sequence[pd.Series], rows: pd.Index) -> Iterator[tuple[str | None, ...]]:
    """Those rows of dictionary-encoded columns; None for missing text."""
    texts = [column.loc[rows].astype(object).where(column.loc[rows].notna(), None) for column in columns]
    return zip(*texts, strict=True)
