"""Measurements as they are kept: append-only JSON Lines, one new file a run, checked on the way in and on the way out.

`<records>/<experiment>_<gpu>_<UTC time>.jsonl` holds what this lab measured, one `Record` a line. `<records>/reported/`
holds what others reported, `Reported` rows and `Claim`s about them: other models, so that the two never share a column.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import pandas as pd
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from dsv4lab.files import write_atomically
from dsv4lab.hardware import gpu_slug
from dsv4lab.roofline import Work

_ABSOLUTE_PATH = re.compile(r"(?<![\w./)\]])/[\w.~-]|(?<![A-Za-z])[A-Za-z]:\\")
_FILE = re.compile(r"(?P<experiment>[a-z0-9_]+)_(?P<gpu>[a-z0-9-]+)_(?P<time>\d{8}T\d{6}Z)\.jsonl")
_CHECK = ("error", "baseline_error", "tolerance")
_M = TypeVar("_M", bound=BaseModel)


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every string below `value`, keys included, with the dotted name of where it stands."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield name, key
            yield from _strings(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, name)


class _Line(BaseModel):
    """Closed, frozen, and free of absolute paths: records are published."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _no_absolute_paths(self) -> Self:
        for name, text in _strings(self.model_dump(mode="json")):
            if _ABSOLUTE_PATH.search(text):
                raise ValueError(f"{name} must not hold an absolute path, got {text!r}")
        return self


class Git(_Line):
    """The commit measured, and whether the tree differed from it; None where there was no repository."""

    commit: str | None
    dirty: bool | None


class Environment(_Line):
    """What the measurement ran on. `gpu` is the driver's name of the device; None on a machine without one."""

    gpu: str | None
    gpu_count: int
    capability: tuple[int, int] | None
    driver: str | None
    cuda: str | None
    python: str
    torch: str | None
    triton: str | None
    sglang: str | None = None


class Clocks(_Line):
    """Clocks, temperature and power before and after the samples, as far as the driver tells."""

    before: dict[str, JsonValue] | None
    after: dict[str, JsonValue] | None


class Record(_Line):
    """One implementation measured on one case: raw samples, and all that is needed to judge and to repeat them.

    A kernel's record has `work` and a passed `check` (error, baseline_error and tolerance at least). A serving record
    has `server` (what it says of itself, hooks proven live, load), the `result` in numbers, and in `check` how many
    requests failed: with too many, `passed` is false, which is recorded and not hidden. A `result` without a server is
    what an experiment found out, and needs no samples; whether it is right is again in `check.passed`. Beside `work` a
    result is told along with a measurement, which is judged as a kernel's.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    experiment: str = Field(pattern="^[a-z0-9_]+$")
    case: str
    impl: str
    config: dict[str, JsonValue]
    method: dict[str, JsonValue]
    samples_us: list[Annotated[float, Field(gt=0)]]
    check: dict[str, JsonValue] = Field(min_length=1)
    work: Work | None
    seed: int
    argv: list[str]
    date_utc: Annotated[AwareDatetime, AfterValidator(lambda time: time.astimezone(UTC))]
    git: Git
    kernel_sha256: str | None = Field(pattern="^[0-9a-f]{64}$")
    env: Environment
    clocks: Clocks
    server: dict[str, JsonValue] | None = None
    result: dict[str, bool | float | str | None] | None = None
    file: str | None = Field(default=None, exclude=True)
    """The record file it was read from; never stored."""

    @model_validator(mode="after")
    def _is_checked(self) -> Self:
        if not self.samples_us and (self.server is not None or self.result is None):
            raise ValueError("samples_us must not be empty: only a result without a server needs none")
        if self.server is not None or (self.result is not None and self.work is None):
            if self.result is None or not isinstance(self.check.get("passed"), bool):
                raise ValueError("result and check.passed must be given for a server and for a result")
        else:
            if self.check.get("passed") is False:
                raise ValueError("check.passed must not be false: what is wrong is not measured")
            if self.work is None:
                raise ValueError("work must be given for a kernel")
            for key in _CHECK:
                value = self.check.get(key)
                if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                    raise ValueError(f"check.{key} must be a finite number, got {value!r}")
            if self.check["error"] > self.check["tolerance"]:
                raise ValueError(f"check.error {self.check['error']} exceeds the tolerance {self.check['tolerance']}")
        return self

    @property
    def median_us(self) -> float:
        return self._percentile(50)

    @property
    def p10_us(self) -> float:
        return self._percentile(10)

    @property
    def p90_us(self) -> float:
        return self._percentile(90)

    def _percentile(self, percent: float) -> float:
        """Of the samples; NaN where there are none."""
        return float(np.percentile(self.samples_us, percent)) if self.samples_us else float("nan")


class Reported(_Line):
    """One number that somebody else measured. `approximate`: quoted with a "~"."""

    experiment: str
    case: str
    stage: str
    quantity: str
    value: float
    unit: str
    source: str
    approximate: bool = False
    provenance: Literal["reported"] = "reported"


class Claim(_Line):
    """A ratio that somebody else quoted, to be recomputed: each operand names one `Reported` row by its columns."""

    claim: str
    quoted: str = Field(pattern=r"^\d+(\.\d+)?$")
    unit: Literal["x", "%"]
    numerator: dict[str, str]
    denominator: dict[str, str]
    source: str


class _ReportedFile(_Line):
    rows: list[Reported]
    claims: list[Claim]


def root() -> Path:
    """The records folder of this checkout; FileNotFoundError if the package was installed without one."""
    records = Path(__file__).resolve().parents[1] / "records"
    if not (records / "reported").is_dir():
        raise FileNotFoundError(
            "dsv4lab runs without its checkout: say where the records are (records_dir=, directory=)"
        )
    return records


def write(records: Sequence[Record], experiment: str, directory: Path | str | None = None) -> Path:
    """Store the records of one run on one GPU as a new file, all or nothing, and return its path.

    ValueError if the records are none, of another experiment or of several GPUs; FileExistsError rather than overwrite.
    """
    if not records:
        raise ValueError("records is empty: nothing to write")
    if other := {record.experiment for record in records} - {experiment}:
        raise ValueError(f"records must all be of experiment {experiment!r}, got {sorted(other)}")
    if len(gpus := {gpu_slug(record.env.gpu) for record in records}) > 1:
        raise ValueError(f"records must all be of one GPU, got {sorted(gpus)}")
    directory = root() if directory is None else Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{experiment}_{gpus.pop()}_{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl"
    if path.exists():
        raise FileExistsError(f"{path.name} exists already: records are never rewritten")
    write_atomically(path, "".join(record.model_dump_json(by_alias=True) + "\n" for record in records))
    return path


def read(experiment: str, directory: Path | str | None = None) -> list[Record]:
    """Every record of `experiment`, oldest file first for each GPU.

    FileNotFoundError if there is none; ValueError naming file, line and field where a line is broken.
    """
    directory = root() if directory is None else Path(directory)
    names = (path.name for path in directory.glob(f"{experiment}_*.jsonl"))
    files = sorted(name for name in names if (m := _FILE.fullmatch(name)) and m["experiment"] == experiment)
    if not files:
        raise FileNotFoundError(f"no records of experiment {experiment!r} in {directory}")
    return [record for name in files for record in _read_file(directory / name, experiment)]


def _read_file(path: Path, experiment: str) -> Iterator[Record]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = _parse(Record, line, f"{path.name}, line {number}")
        if record.experiment != experiment:
            raise ValueError(f"{path.name}, line {number}: experiment is {record.experiment!r}")
        yield record.model_copy(update={"file": path.name})


def read_partial(path: Path) -> list[Record]:
    """The records of a run that was cut off; what it had begun to write as it was is cut from the file too."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_atomically(path, whole)
    return [_parse(Record, line, f"{path.name}, line {n}") for n, line in enumerate(whole.splitlines(), 1)]


def _parse(model: type[_M], text: str, where: str) -> _M:
    """`text` as a model, or the first complaint as one line: where, field, what is wrong."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "record"
        raise ValueError(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}") from None


def to_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a record: experiment, case, impl, every entry of `config` under its own name, median_us, p10_us, p90_us,
    samples, error, baseline_error, tolerance, flops, bytes, passed, gpu, date_utc, file, and every entry of `result`.

    ValueError if there are no records, or if a config entry has the name of another column.
    """
    if not records:
        raise ValueError("records is empty: no frame to make")
    return pd.DataFrame([_row(record) for record in records])


def _row(record: Record) -> dict[str, Any]:
    row = {"experiment": record.experiment, "case": record.case, "impl": record.impl}
    results = (record.result or {}) | {
        "passed": record.check.get("passed", True),
        "median_us": record.median_us,
        "p10_us": record.p10_us,
        "p90_us": record.p90_us,
        "samples": len(record.samples_us),
        **{key: record.check.get(key) for key in _CHECK},
        "flops": record.work and record.work.flops,
        "bytes": record.work and record.work.bytes,
        "gpu": record.env.gpu,
        "date_utc": record.date_utc,
        "file": record.file,
    }
    if hidden := sorted(record.config.keys() & (row.keys() | results.keys())):
        raise ValueError(f"config must not use the names of other columns, got {hidden}")
    return row | record.config | results


def select_run(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the newest file of each experiment and GPU, so that what is compared was measured together."""
    if frame["file"].isna().any():
        raise ValueError("frame must come from record files, got rows without one")
    newest = frame.groupby(["experiment", "gpu"], dropna=False)["file"].transform("max")
    return frame[frame["file"] == newest].reset_index(drop=True)


def _read_reported(directory: Path | str | None) -> list[_ReportedFile]:
    folder = (root() if directory is None else Path(directory)) / "reported"
    paths = sorted(folder.glob("*.json"))
    return [_parse(_ReportedFile, path.read_text(encoding="utf-8"), path.name) for path in paths]


def reported(directory: Path | str | None = None) -> pd.DataFrame:
    """The reported numbers, one row each, with the columns of `Reported`."""
    return pd.DataFrame([row.model_dump() for file in _read_reported(directory) for row in file.rows])


def claims(directory: Path | str | None = None) -> pd.DataFrame:
    """The reported ratios: claim, quoted (text), unit, recomputed from the reported rows, agrees (to its digits)."""
    rows = reported(directory)
    found = []
    for claim in (claim for file in _read_reported(directory) for claim in file.claims):
        value = _one(rows, claim.numerator) / _one(rows, claim.denominator) * (100 if claim.unit == "%" else 1)
        decimals = len(claim.quoted.partition(".")[2])
        agrees = f"{value:.{decimals}f}" == claim.quoted
        found.append(claim.model_dump(include={"claim", "quoted", "unit"}) | {"recomputed": value, "agrees": agrees})
    return pd.DataFrame(found)


def _one(rows: pd.DataFrame, columns: dict[str, str]) -> float:
    matching = rows[(rows[list(columns)] == pd.Series(columns)).all(axis=1)]
    if len(matching) != 1:
        raise ValueError(f"an operand must name one reported row, {columns} names {len(matching)}")
    return matching["value"].item()
