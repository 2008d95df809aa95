"""What this machine has decides how tests run: kernels on the GPU, or interpreted and without the tests marked gpu."""

import os
from collections.abc import Callable

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores; torch reads this once

import dsv4lab.kernels  # noqa: F401 (before any test imports Triton: it decides whether kernels are interpreted)
from dsv4lab import hardware

HAS_GPU = hardware.probe() is not None


@pytest.fixture
def kernels_of() -> Callable[[Callable[[], object]], list[str]]:
    """What a call runs on the GPU, by name and sorted: kernels, copies and fills."""
    import torch

    def run(call: Callable[[], object]) -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        return sorted(event.name for event in profile.events() if event.device_type == cuda)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU: torch sees no CUDA device"))
