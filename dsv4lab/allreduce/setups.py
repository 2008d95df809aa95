"""What is compared: NCCL left alone and told how, kernels over symmetric memory, gloo; and the sizes."""

from dataclasses import dataclass, field

from dsv4lab.hardware import NO_MULTICAST, ONE_MACHINE

KIB, MIB = 1024, 1024**2
SIZES = tuple(4 * KIB << n for n in range(15))
"""Bytes of a message: 4 KiB to 64 MiB."""
QUICK_SIZES = (4 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, 1 * MIB, 16 * MIB)
CPU_SIZES = SIZES[:9]
"""For gloo, which shares one memory and few cores among all ranks: up to 1 MiB."""

_ON_THIS_MACHINE = ONE_MACHINE | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Setup:
    """Implementations, of `worker.IMPLEMENTATIONS`, that share the processes and environment of a group of ranks."""

    name: str
    backend: str
    impls: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ("eager", "graph")

    def impl_name(self, impl: str) -> str:
        """What records call `impl`: a setup with one has its name."""
        return self.name if len(self.impls) == 1 else impl


def _nccl(name: str, **variables: str) -> Setup:
    return Setup(name, "nccl", ("all_reduce",), {f"NCCL_{key}": value for key, value in variables.items()})


GPU_SETUPS = (
    _nccl("nccl"),
    Setup("symmetric", "nccl", ("one_shot", "two_shot")),
    _nccl("nccl_ring_ll", ALGO="Ring", PROTO="LL"),
    _nccl("nccl_ring_simple", ALGO="Ring", PROTO="Simple"),
    _nccl("nccl_ring_ll128", ALGO="Ring", PROTO="LL128"),
    _nccl("nccl_tree_ll", ALGO="Tree", PROTO="LL"),
    _nccl("nccl_tree_simple", ALGO="Tree", PROTO="Simple"),
    _nccl("nccl_4_channels", MIN_NCHANNELS="4", MAX_NCHANNELS="4"),
    _nccl("nccl_16_channels", MIN_NCHANNELS="16", MAX_NCHANNELS="16"),
)
"""In the order of what would be missed most if time runs out."""
QUICK_SETUPS = GPU_SETUPS[:4]
CPU_SETUPS = (Setup("gloo", "gloo", ("all_reduce",), modes=("eager",)),)


def variables(setup: Setup) -> dict[str, str]:
    """What the ranks of a setup get on top of the user's environment; multicast is off whatever that says."""
    return _ON_THIS_MACHINE | setup.environment | NO_MULTICAST


def label(nbytes: int) -> str:
    """4096 -> "4KiB", 1048576 -> "1MiB"."""
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"
