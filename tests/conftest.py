"""What this machine has decides how tests run: kernels on the GPU, or interpreted and without the tests marked gpu."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores; torch reads this once

from dsv4lab import hardware

HAS_GPU = hardware.probe() is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU: torch sees no CUDA device"))
