"""Peaks of the GPUs the lab knows, with their sources, and a look at the one that is here and at what joins several."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")

KIB, MIB = 1024, 1024**2
SM120_SHARED_MEMORY = 99 * KIB
"""Bytes of shared memory a block may have on sm_120, sm_121 and sm_89: the limit every shipped config must keep."""

REGISTERS_PER_SM = 64 * KIB
RESERVED_PER_BLOCK = KIB
"""Bytes of shared memory that the driver takes for each block beyond what the block asks for."""
WARPS_PER_SM = {(8, 0): 64, (9, 0): 64}
"""Warps that an SM holds at most; 48 on the other architectures here (CUDA programming guide, compute capabilities)."""

EARLY_LAUNCH = ("sm_90", "sm_120", "sm_121")
"""Architectures on which a kernel can be launched while the one in front still runs."""

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""The environment of processes that share GPUs of one machine without NVLink multicast."""
ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
"""That of processes which need not look for one another in a network."""


@dataclass(frozen=True)
class GPU:
    """One GPU model. Rates are dense peaks at boost clock; `bf16_flops` and `fp8_flops` accumulate in fp32.

    `name` is what the driver reports, less "NVIDIA "; `aliases` are other names of the same part. A sibling with other
    clocks, memory or SMs (PCIe, NVL, Max-Q, Server, Laptop) is another part, and not found under this name.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_memory_per_block: int  # bytes, opt-in
    l2_bytes: int
    dram_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def warps_per_sm(self) -> int:
        return WARPS_PER_SM.get(self.capability, 48)

    def resident_blocks(self, warps: int, registers: int, shared_bytes: int) -> int:
        """How many blocks of a kernel an SM holds at once, by warps, registers a thread, and bytes of shared memory."""
        registers = warps * 32 * (-(-registers // 8) * 8)
        shared = -(-shared_bytes // 128) * 128 + RESERVED_PER_BLOCK
        room = self.shared_memory_per_block + RESERVED_PER_BLOCK
        return min(self.warps_per_sm // warps, REGISTERS_PER_SM // registers, room // shared)


GPUS = (
    GPU("H200", (9, 0), 132, 227 * KIB, 60 * MIB, 4.8e12, 989.4e12, 1978.9e12, "NVIDIA H200 SXM datasheet; L2 probed"),
    GPU(
        name="H100 80GB HBM3",
        capability=(9, 0),
        sms=132,
        shared_memory_per_block=227 * KIB,
        l2_bytes=50 * MIB,
        dram_bytes_per_s=3.35e12,
        bf16_flops=989.4e12,
        fp8_flops=1978.9e12,
        source="NVIDIA H100 SXM datasheet",
        aliases=("H100",),
    ),
    GPU(
        name="RTX PRO 6000 Blackwell Workstation Edition",
        capability=(12, 0),
        sms=188,
        shared_memory_per_block=SM120_SHARED_MEMORY,
        l2_bytes=128 * MIB,
        dram_bytes_per_s=1.792e12,
        bf16_flops=503.8e12,
        fp8_flops=1007.6e12,
        source="NVIDIA RTX PRO 6000 Blackwell datasheet; tensor rates from the RTX Blackwell PRO whitepaper",
        aliases=("RTX PRO 6000 Blackwell",),
    ),
    GPU(
        name="GeForce RTX 5090",
        capability=(12, 0),
        sms=170,
        shared_memory_per_block=SM120_SHARED_MEMORY,
        l2_bytes=96 * MIB,
        dram_bytes_per_s=1.792e12,
        bf16_flops=209.5e12,
        fp8_flops=419.0e12,
        source="NVIDIA RTX Blackwell whitepaper",
        aliases=("RTX 5090",),
    ),
    GPU(
        name="GB10",
        capability=(12, 1),
        sms=48,
        shared_memory_per_block=SM120_SHARED_MEMORY,
        l2_bytes=24 * MIB,
        dram_bytes_per_s=273e9,
        bf16_flops=125e12,
        fp8_flops=250e12,
        source="NVIDIA DGX Spark datasheet; rates are 1/8 and 1/4 of its 1 PFLOP/s of sparse FP4, an upper bound",
        aliases=("DGX Spark", "DGX Spark GB10"),
    ),
    GPU(
        name="GeForce RTX 4090",
        capability=(8, 9),
        sms=128,
        shared_memory_per_block=SM120_SHARED_MEMORY,
        l2_bytes=72 * MIB,
        dram_bytes_per_s=1.008e12,
        bf16_flops=165.2e12,
        fp8_flops=330.3e12,
        source="NVIDIA Ada whitepaper",
        aliases=("RTX 4090",),
    ),
    GPU("L40S", (8, 9), 142, SM120_SHARED_MEMORY, 96 * MIB, 864e9, 362.05e12, 733e12, "NVIDIA L40S datasheet"),
    GPU(
        name="A100-SXM4-80GB",
        capability=(8, 0),
        sms=108,
        shared_memory_per_block=163 * KIB,
        l2_bytes=40 * MIB,
        dram_bytes_per_s=2.039e12,
        bf16_flops=312e12,
        fp8_flops=None,  # no FP8 tensor cores
        source="NVIDIA A100 datasheet",
        aliases=("A100",),
    ),
)


def lookup(name: str) -> GPU:
    """The GPU of this name or alias, in any case, with or without the driver's "NVIDIA "; ValueError if none is."""
    wanted = name.lower().removeprefix("nvidia ")
    for gpu in GPUS:
        if wanted in (known.lower() for known in (gpu.name, *gpu.aliases)):
            return gpu
    raise ValueError(f"name {name!r} is no GPU of the table; known: {', '.join(gpu.name for gpu in GPUS)}")


def gpu_slug(gpu: str | None) -> str:
    """A GPU's name as file names have it: "NVIDIA H200" -> "h200"; "cpu" for None."""
    return re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower().removeprefix("nvidia ")).strip("-")


def arch_key(capability: tuple[int, int]) -> str:
    """(9, 0) -> "sm_90", the key of config tables."""
    major, minor = capability
    return f"sm_{major}{minor}"


def sms_of(arch: str) -> int:
    """SMs of the first GPU listed with an architecture like "sm_90"."""
    return next(gpu.sms for gpu in GPUS if arch_key(gpu.capability) == arch)


def arch_entry(table: Mapping[str, T], arch: str, relatives: Mapping[str, str]) -> T:
    """The entry of a config table for an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    if (known := relatives.get(arch, arch)) not in table:
        raise ValueError(f"no configuration for arch {arch!r}; the table has {', '.join(table)}")
    return table[known]


def present() -> bool:
    """Whether torch finds a CUDA GPU. Touches none, unlike `probe`: a process of another GPU leaves nothing on it."""
    try:
        return import_module("torch").cuda.is_available()  # by name: this module must load without torch
    except (ImportError, OSError):
        return False


def probe() -> dict[str, Any] | None:
    """What the driver says of the current CUDA device and how many there are, or None where torch finds no GPU."""
    if not present():
        return None
    cuda = import_module("torch").cuda
    device = cuda.get_device_properties(cuda.current_device())
    return {
        "name": device.name,
        "count": cuda.device_count(),
        "capability": (device.major, device.minor),
        "sms": device.multi_processor_count,
        "shared_memory_per_block": device.shared_memory_per_block_optin,
        "l2_bytes": device.L2_cache_size,
        "memory_bytes": device.total_memory,
    }


def link() -> str | None:
    """What nvidia-smi calls the way from the first GPU to the second, as "NV18" or "PHB"; None if it does not say."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    row = re.search(r"^GPU0\s+X\s+(\S+)", re.sub(r"\x1b\[[0-9;]*m", "", text), re.MULTILINE)
    return row and row[1]
