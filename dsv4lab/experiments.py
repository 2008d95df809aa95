"""What `dsv4lab measure` can run: every kernel module in one way, and the experiments that are more than a kernel.

Each is a function that measures, and returns its new record file; what it can be asked for are its keyword arguments.
"""

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dsv4lab import hardware


@dataclass(frozen=True)
class Experiment:
    """function: "module:name", imported only when asked for. gpu: it cannot do without one."""

    function: str
    gpu: bool = True


EXPERIMENTS = {
    "allreduce": Experiment("dsv4lab.allreduce.sweep:run", gpu=False),
    "bf16_drift": Experiment("dsv4lab.flip:run_drift", gpu=False),
    "bf16_selection": Experiment("dsv4lab.flip:run_selection", gpu=False),
    "c4_layer": Experiment("dsv4lab.c4_layer:run"),
    "capture": Experiment("dsv4lab.capture.matrix:run"),
    "capture_gain": Experiment("dsv4lab.capture.gain:run"),
}
KERNEL_MODULE = Experiment("dsv4lab.measure:run")


def run(stem: str, directory: Path | str | None = None, **options: Any) -> Path:
    """Runs an experiment, or measures the kernel module `stem`, and returns the new record file.

    options: what was asked for; None, False and () is nothing.

    Raises ValueError naming an option that it does not take, a value that is wrong, or the GPU that is missing;
    otherwise what the function raises.
    """
    experiment = EXPERIMENTS.get(stem, KERNEL_MODULE)
    if experiment.gpu and hardware.probe() is None:
        raise ValueError(f"{stem} needs a CUDA GPU, and torch sees none (dsv4lab doctor says why)")
    function = resolve_name(experiment.function)
    asked = {name: value for name, value in options.items() if value not in (None, ()) and value is not False}
    takes = signature(function).parameters
    for name in asked:
        if name not in takes:
            known = ", ".join(option for option in options if option in takes)
            raise ValueError(f"{name} is no option of {stem}" + (f", which takes {known}" if known else ""))
    return function(*([stem] if experiment is KERNEL_MODULE else []), **asked, directory=directory)
