"""Runs notebooks one after the other, each in a process of its own, and keeps the report up to date as they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dsv4lab import __version__, hardware
from dsv4lab.notebooks import parameters, report
from dsv4lab.notebooks.results import GOOD, RESULT_VARIABLE, Outcome, Report, Result, UsageError, Verdict
from dsv4lab.notebooks.worker import Ended, Request

ROOT = Path(__file__).resolve().parents[2]
"""Where the package lies: the checkout, with notebooks/ and figures/ in it, unless it was installed without one."""

GRACE_S = 15
"""How long an interrupted notebook has to shut its kernel down before both are killed."""

PACKAGES = ("torch", "triton", "numpy", "pandas", "matplotlib", "papermill", "nbconvert", "ipykernel")


@dataclass(frozen=True)
class Job:
    """One notebook to run: all its parameters in effect, as asked for, and those to inject over its own text."""

    notebook: Path
    values: dict[str, Any]
    changed: dict[str, Any]


def plan(notebooks: Sequence[str], given: Sequence[str], *, live: bool, records: Path | None) -> list[Job]:
    """Finds the notebooks and checks all their parameters before anything runs.

    Args:
        notebooks: paths, names in notebooks/ or the beginnings of such names; none means all of notebooks/.
        given: "NAME=VALUE", each declared by every notebook chosen.
        live: passed on as parameter `live` where it is declared.
        records: folder for new record files, passed on as parameter `records_dir` where it is declared.

    Raises:
        UsageError: a notebook or a parameter that does not exist, a value of another type.
    """
    paths = [path for name in notebooks for path in _find(name)] or _chapters()
    if twice := {path.stem for path in paths if [other.stem for other in paths].count(path.stem) > 1}:
        raise UsageError(f"notebook {min(twice)} is named twice")
    own = {"live": live} | ({} if records is None else {"records_dir": records.name})  # a report is published: no paths
    jobs = []
    for path in paths:
        declared = parameters.declared(path)
        values = parameters.resolve(declared, given, path.name)
        if taken := {"live", "records_dir"} & values.keys():
            raise UsageError(f"parameter {min(taken)!r} is set by --live, --no-live and --records, not by -p")
        defaults = {name: parameter.default for name, parameter in declared.items()}
        values = defaults | values | {name: value for name, value in own.items() if name in declared}
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        if records is not None and "records_dir" in changed:
            changed["records_dir"] = str(records.resolve())  # the notebook runs in a folder of its own
        jobs.append(Job(path, values, changed))
    return jobs


def run(jobs: Sequence[Job], out: Path, *, live: bool, timeout: int) -> Report:
    """Executes `jobs` in order, with `timeout` seconds a cell, and writes the report to `out` after each.

    A notebook that fails, dies or is killed does not stop the others. An interrupt (Ctrl-C or SIGTERM) does:
    its kernel is shut down, the report says what was not run, and KeyboardInterrupt is raised.
    """
    gpu = hardware.probe()
    ended: list[Outcome] = []
    left = [Outcome(notebook=job.notebook.stem, verdict="not run", parameters=job.values) for job in jobs]

    def written() -> Report:
        state = Report(
            mode="live" if live else "recorded",
            device=gpu["name"] if gpu else "no GPU",
            date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            outcomes=(*ended, *left),
        )
        report.write(state, out, sorted((ROOT / "figures").glob("*.svg")))
        return state

    with writable(out, "--out") as scratch, _sigterm_interrupts():
        state = written()
        try:
            for index, job in enumerate(jobs):
                print(f"{job.notebook.stem}: " + " ".join(f"{name}={value!r}" for name, value in job.values.items()))
                ended.append(_execute(job, Path(scratch) / str(index), out, timeout))
                del left[0]
                state = written()
                print(report.line(ended[-1]), flush=True)
                if ended[-1].verdict == "interrupted":
                    raise KeyboardInterrupt
        finally:
            print(f"report: {out / 'index.html'}")
    return state


def _chapters() -> list[Path]:
    if not (found := sorted((ROOT / "notebooks").glob("*.ipynb"))):
        raise UsageError("there is no notebooks/ folder beside the package: name the notebooks to run")
    return found


def _find(name: str) -> list[Path]:
    """The file `name`, or the chapters whose name begins with it: "03" is enough."""
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return [path.resolve()]
    if path.name and (found := [chapter for chapter in _chapters() if chapter.name.startswith(path.name)]):
        return found
    raise UsageError(f"notebook {name!r} does not exist; there are {', '.join(path.stem for path in _chapters())}")


@contextmanager
def writable(folder: Path, argument: str) -> Iterator[str]:
    """Makes `folder` and a scratch folder in it, or raises a UsageError naming the argument that chose it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix=".running-", dir=folder.resolve())
    except OSError as error:
        raise UsageError(f"{argument} {folder} cannot be written to: {error.strerror}") from error
    with scratch as name:
        yield name


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _execute(job: Job, folder: Path, out: Path, timeout: int) -> Outcome:
    folder.mkdir()
    start = time.monotonic()
    worker = _start(job, folder, timeout)
    try:
        worker.wait()
        verdict, detail, result = _judge(folder, worker.returncode)
    except KeyboardInterrupt:
        _stop(worker)
        verdict, detail, result = "interrupted", "", None
    _kill_group(folder / f"{job.notebook.stem}.pid")
    return Outcome(
        notebook=job.notebook.stem,
        verdict=verdict,
        seconds=round(time.monotonic() - start, 1),
        parameters=job.values,
        answer=result.answer if result else "",
        detail=detail.replace(f"{ROOT}{os.sep}", "").replace(str(Path.home()), "~"),
        claims=result.claims if result else (),
        pages=_keep(folder, out, job.notebook.stem, verdict),
    )


def _start(job: Job, folder: Path, timeout: int) -> subprocess.Popen[bytes]:
    request = Request(notebook=job.notebook, folder=folder, parameters=job.changed, timeout=timeout)
    asked = folder / "request.json"
    asked.write_text(request.model_dump_json(), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # found without being installed
    return subprocess.Popen(
        [sys.executable, "-m", "dsv4lab.notebooks.worker", str(asked)],
        env=os.environ | {RESULT_VARIABLE: str(folder / "result.json"), "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which tells the worker
    )


def _judge(folder: Path, returncode: int) -> tuple[Verdict, str, Result | None]:
    """The verdict from the two files left in `folder`: what the notebook said last, and how its execution ended."""
    said, ended = folder / "result.json", folder / "ended.json"
    result = Result.model_validate_json(said.read_text(encoding="utf-8")) if said.exists() else None
    if not ended.exists():
        return "died", f"the process that ran it ended with status {returncode}", result
    end = Ended.model_validate_json(ended.read_text(encoding="utf-8"))
    if end.verdict not in GOOD:
        return end.verdict, end.detail, result
    if result is None or (result.verdict == "skipped") != (end.verdict == "skipped"):
        return "failed", end.detail or "its last cell called no finish()", result
    return result.verdict, "", result


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """Interrupts the worker, which then ends its kernel; kills it if that takes too long."""
    worker.send_signal(signal.SIGINT)
    try:
        worker.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def _kill_group(pid_file: Path) -> None:
    """Kills what is left of a kernel's process group: what it started, or the kernel if the worker could not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(int(pid_file.read_text()), signal.SIGKILL)


def _keep(folder: Path, out: Path, stem: str, verdict: Verdict) -> tuple[str, ...]:
    """Moves what the worker left into `out`, over what an earlier run left; the kernel's log only if it died."""
    for name in (pages := [f"{stem}.html", f"{stem}.ipynb", f"{stem}.log"]):
        (out / name).unlink(missing_ok=True)
    kept = [name for name in pages if (folder / name).exists() and (verdict == "died" or not name.endswith(".log"))]
    for name in kept:
        (folder / name).replace(out / name)
    return tuple(kept)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "dsv4lab": __version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
