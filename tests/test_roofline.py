"""Floors and fractions, by hand."""

import pytest

from dsv4lab.hardware import lookup
from dsv4lab.roofline import Ceilings, Work, floor_s, fraction

CEILINGS = Ceilings(dram_bytes_per_s=4e12, bf16_flops=8e14, source="by hand")


def test_the_slower_of_bytes_and_flops_is_the_floor():
    assert floor_s(Work(flops=8e8, bytes=4e8), CEILINGS) == 1e-4  # memory: 100 us against 1 us
    assert floor_s(Work(flops=8e11, bytes=4e8), CEILINGS) == 1e-3  # compute: 1 ms against 100 us


def test_fraction_of_the_floor():
    work = Work(flops=0, bytes=4e8)
    assert fraction(1e-4, work, CEILINGS) == 1
    assert fraction(4e-4, work, CEILINGS) == 0.25


def test_a_gpu_of_the_table_is_a_ceiling():
    assert floor_s(Work(flops=0, bytes=4.8e12), lookup("H200")) == 1


@pytest.mark.parametrize("kwargs", [{"flops": -1, "bytes": 0}, {"flops": 0, "bytes": float("nan")}])
def test_work_refuses_nonsense(kwargs):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        Work(**kwargs)


def test_ceilings_and_times_must_be_positive():
    with pytest.raises(ValueError, match="bf16_flops must be finite and positive, got 0"):
        Ceilings(dram_bytes_per_s=1, bf16_flops=0, source="by hand")
    with pytest.raises(ValueError, match=r"time_s must be finite and positive, got 0"):
        fraction(0, Work(1, 1), CEILINGS)
