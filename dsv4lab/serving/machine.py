"""What a start can find out beforehand, so that it is refused in one line rather than by a log of a thousand."""

import math
import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dsv4lab.serving.presets import Preset
from dsv4lab.serving.synthetic import LAYER_BYTES

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DRIVER_S = 60
_QUERY = "name,compute_cap,memory.total,memory.free"


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine as its driver describes it; bytes."""

    name: str
    arch: str
    total: float
    free: float


def gpus() -> list[Gpu]:
    """The GPUs here that CUDA may see; none without a driver. Memory that the driver does not tell has no end.

    ValueError if the driver hangs.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None and not seen.strip():
        return []
    chosen = [f"--id={seen}"] if seen else []
    try:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", *chosen]
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_DRIVER_S).stdout
    except subprocess.TimeoutExpired:
        raise ValueError(f"nvidia-smi does not answer within {_DRIVER_S} s: the driver hangs") from None
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    return [
        Gpu(name, "sm_" + capability.replace(".", ""), _bytes(total), _bytes(free))
        for name, capability, total, free in rows
    ]


def _bytes(mib: str) -> float:
    return float(mib) * 2**20 if mib.isdigit() else math.inf  # "[N/A]" where it is the machine's own


def usual_port() -> int:
    """30000 and the number of the first GPU that CUDA may see, so that servers on different GPUs do not meet."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    return 30000 + (int(first) if first.isdigit() else 0)


def check_gpus(preset: Preset, name: str, ranks: int, weights: float, found: list[Gpu]) -> None:
    """ValueError if the preset is for others, there are too few, or the weights cannot fit beside what runs there."""
    if not found:
        raise ValueError("serve needs an NVIDIA GPU, and nvidia-smi sees none")
    if preset.arch and (wrong := [gpu for gpu in found if gpu.arch != preset.arch]):
        raise ValueError(f"preset {name} is for {preset.arch}, and here is {wrong[0].name}, {wrong[0].arch}")
    if ranks > len(found):
        raise ValueError(f"{ranks} ranks need as many GPUs, and here are {len(found)}")
    least = min(found[:ranks], key=lambda gpu: gpu.free)
    if weights / ranks > least.free:
        raise ValueError(
            f"the weights take {weights / ranks / 2**30:.0f} GiB a GPU, and of the {least.total / 2**30:.0f} GiB of "
            f"{least.name} {least.free / 2**30:.0f} are free"
        )


def weight_bytes(model: Path, layers: int) -> float:
    """Bytes of the weights: of the first `layers` layers with dummy weights, else of the files; 0 if not known here."""
    return layers * LAYER_BYTES if layers else sum(path.stat().st_size for path in model.glob("*.safetensors"))


def check_model(model: str) -> None:
    """ValueError unless `model` is a folder with a config.json, or could be a name on the Hugging Face hub."""
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {model} has no config.json")
    elif folder.is_absolute() or model.startswith(".") or not _HUB_NAME.fullmatch(model):
        raise ValueError(f"model {model} does not exist")


def check_port(host: str, port: int) -> None:
    """ValueError unless the port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port {port} of {host} cannot be had: {error.strerror}") from None
