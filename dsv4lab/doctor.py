"""Looks at the machine: what the lab can do here, and the command that mends what it cannot."""

import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from packaging.requirements import Requirement

from dsv4lab import __version__, hardware, records, tuned

ROOT = Path(__file__).resolve().parents[1]
CAMPAIGN_ARCH = "sm_120"
OPTIONAL_GROUPS = ("serve", "dev")
OPTIONAL_PACKAGES = ("jupyterlab", "nbstripout", "nbval")
"""What the chapters run without: a server, and the tools to work on the lab."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is a command, empty where nothing needs one. Only `broken` ones stop the lab."""

    subject: str
    text: str
    fix: str = ""
    broken: bool = False


def examine() -> list[Finding]:
    """Everything there is to say about this machine, in the order in which things depend on each other."""
    gpu = hardware.probe()
    found = [Finding("dsv4lab", __version__), *_packages(), _gpu(gpu), *_records()]
    if not any(finding.broken for finding in found if finding.subject == "kernels"):
        found += _kernels(gpu)
    return [*found, *_tuned(gpu)] if gpu else found


def lines(findings: list[Finding]) -> Iterator[str]:
    """The findings as aligned text, each fix under what it mends, and last what the lab can do."""
    for finding in findings:
        yield f"{finding.subject:<10}  {finding.text}"
        if finding.fix:
            yield f"{'':<10}  -> {finding.fix}"
    ready = not any(finding.broken for finding in findings)
    yield "ready: dsv4lab run" if ready else "not ready: run the commands marked with -> above"


def _packages() -> Iterator[Finding]:
    if not (ROOT / "pyproject.toml").exists():
        yield Finding("checkout", "none: the kernels work, the chapters are not here", "git clone the repository", True)
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = "" if shutil.which("nvidia-smi") else "-c constraints/cpu.txt "
    for group, names in {"core": project["dependencies"], **project["optional-dependencies"]}.items():
        wanted = [found for found in map(Requirement, names) if not found.marker or found.marker.evaluate()]
        versions = {requirement.name: _installed(requirement.name) for requirement in wanted}
        lacking = {r.name: r.specifier for r in wanted if not _satisfies(versions[r.name], r)}
        if not lacking:
            yield Finding(group, ", ".join(f"{name} {number}" for name, number in versions.items()))
            continue
        command = f"pip install {pins if group != 'serve' else ''}-e '.{'' if group == 'core' else f'[{group}]'}'"
        needed = group not in OPTIONAL_GROUPS and not lacking.keys() <= set(OPTIONAL_PACKAGES)
        text = "missing" if needed else "missing, and not needed to run the chapters"
        yield Finding(group, f"{text}: {', '.join(f'{n}{s}' for n, s in lacking.items())}", command, needed)


def _satisfies(number: str | None, wanted: Requirement) -> bool:
    return number is not None and wanted.specifier.contains(number, prereleases=True)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(gpu: dict | None) -> Finding:
    if gpu is None:
        if not _installed("torch"):
            return Finding("gpu", "unknown: torch is what would see one")
        if shutil.which("nvidia-smi"):
            text = f"torch {_installed('torch')} sees none, though nvidia-smi is here: recorded mode only"
            return Finding("gpu", text, "pip install --force-reinstall torch triton")
        return Finding("gpu", "none: kernels are interpreted, measurements are read from the committed records")
    seen = f"{gpu['name']}, {hardware.arch_key(gpu['capability'])}, {gpu['sms']} SMs, {gpu['count']} here: live mode"
    try:
        peaks = hardware.lookup(gpu["name"])
    except ValueError:
        return Finding("gpu", f"{seen}; its datasheet peaks are unknown", "add it to GPUS in dsv4lab/hardware.py")
    return Finding(
        "gpu", f"{seen}; peaks {peaks.dram_bytes_per_s / 1e12:.2f} TB/s, {peaks.bf16_flops / 1e12:.0f} TFLOP/s"
    )


def _kernels(gpu: dict | None) -> Iterator[Finding]:
    """What would run here; torch and triton may be installed and yet not load, so both are imported by name."""
    try:
        kernels, peers = import_module("dsv4lab.kernels"), import_module("dsv4lab.peers")
        modules = [import_module(f"{kernels.__name__}.{found.name}") for found in iter_modules(kernels.__path__)]
        found = [(experiment, peer) for experiment in peers.PEERS for peer in peers.peers_of(experiment)]
    except (ImportError, OSError) as error:
        text = f"torch or triton does not load: {str(error).splitlines()[0]}"
        yield Finding("kernels", text, "pip install --force-reinstall torch triton", broken=True)
        return
    arch = hardware.arch_key(gpu["capability"]) if gpu else CAMPAIGN_ARCH
    if gpu is None:
        yield Finding("configs", f"none, kernels are interpreted; on the campaign's {arch} they would be")
    for module in modules:
        if getattr(getattr(module, "describe", None), "__module__", "") == module.__name__:  # not another's, passed on
            yield from (Finding("configs", text) for text in _configs(module, arch))
    for experiment, peer in found:
        why, _, command = (peer.unavailable() or "available").partition(": ")
        yield Finding("peer", f"{peer.IMPL} for {experiment}: {why}", command)


def _configs(module: ModuleType, arch: str) -> list[str]:
    name = module.__name__.rpartition(".")[2]
    try:
        return [f"{name}: {text}" for text in module.describe(arch)]
    except (LookupError, ValueError):
        return [f"{name} has none for {arch}: give config= in the call"]


def _tuned(gpu: dict) -> Iterator[Finding]:
    """The tables that `dsv4lab tune` left for this GPU, and which of them do not hold any more."""
    root = tuned.folder()
    if root is None:
        yield Finding("tuned", f"turned off: {tuned.VARIABLE} is empty")
        return
    lines = list(tuned.describe(root, gpu["name"]))
    yield from (Finding("tuned", f"{line} ({root})") for line in lines)
    try:
        kernels = tuned.read_kernels(root, gpu["name"])
        choices, triton = import_module("dsv4lab.kernels.choices"), _installed("triton")
        for kernel, table in kernels.items():
            import_module(f"dsv4lab.kernels.{kernel}")
            why = tuned.complaint(table, choices.source_hash(f"dsv4lab.kernels.{kernel}"), triton)
            text = f"not used, {why}" if why else f"used ({tuned.kernels_path(root, gpu['name'])})"
            yield Finding("tuned", f"{kernel}: {text}", tuned.COMMANDS[kernel] if why else "")
    except (ImportError, OSError, ValueError, LookupError) as error:
        yield Finding("tuned", str(error))
        return
    if not lines and not kernels:
        yield Finding("tuned", f"nothing for this GPU in {root}: shipped configs run", "dsv4lab tune")


def _records() -> Iterator[Finding]:
    try:
        names = sorted(path.stem for path in records.root().glob("*.jsonl"))
    except FileNotFoundError as error:
        yield Finding("records", str(error), "git clone the repository", True)
        return
    runs = Counter(name.rsplit("_", 1)[0] for name in names)
    if not runs:
        yield Finding("records", "no run is recorded", "dsv4lab run --live", True)
    for run, count in runs.items():
        newest = max(name for name in names if name.rsplit("_", 1)[0] == run)
        yield Finding("records", f"{run}: {count} run{'s' if count > 1 else ''}, newest {newest.rsplit('_', 1)[1]}")
