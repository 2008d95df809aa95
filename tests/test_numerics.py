"""The error measures themselves: what they must catch, and what they must let pass."""

import math

import pytest
import torch

from dsv4lab.numerics import FLOOR, bitwise_equal, check, poison_, relative_error, selection_overlap, tolerance

INF, NAN = float("inf"), float("nan")


def test_relative_error_is_a_norm_ratio_in_float64():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
    tiny = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert relative_error(tiny, torch.ones(2, dtype=torch.float64)) == pytest.approx(1e-12 / math.sqrt(2), rel=1e-3)
    assert relative_error(torch.full((3,), 3e38), torch.full((3,), 3e38)) == 0  # squares overflow in fp32


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_relative_error_is_infinite_for_anything_not_finite(bad):
    good, poisoned = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    assert relative_error(poisoned, good) == INF
    assert relative_error(good, poisoned) == INF
    assert relative_error(poisoned, poisoned) == INF


def test_relative_error_against_zeros_and_other_shapes():
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == INF
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    with pytest.raises(ValueError, match=r"x has shape \(2,\), ref has \(2, 1\)"):
        relative_error(torch.ones(2), torch.ones(2, 1))


def test_tolerance_refuses_a_broken_baseline():
    assert tolerance(0.002, floor=1e-5) == 0.00401
    assert tolerance(0.0) == FLOOR
    for broken in (INF, NAN, -1.0):
        with pytest.raises(ValueError, match="baseline_error must be finite"):
            tolerance(broken)


def test_check_allows_twice_the_baseline_and_no_more():
    reference = torch.ones(1000, dtype=torch.float64)
    baseline = reference + 1e-3
    assert check(reference + 1.9e-3, reference, baseline).passed
    failed = check(reference + 2.2e-3, reference, baseline)
    assert not failed.passed
    assert failed.error == pytest.approx(2.2e-3)
    assert failed.tolerance == pytest.approx(2e-3 + FLOOR)
    assert not check(reference * NAN, reference, baseline).passed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_poison_is_nan_through_any_stride(dtype):
    whole = torch.zeros(6, 8).to(dtype)
    part = whole[::2, 1:7:2]
    assert poison_(part) is part
    assert part.float().isnan().all()
    assert whole.float().isnan().sum() == part.numel()


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int32, -1), (torch.int64, -1), (torch.int8, -1), (torch.uint8, 255)]
)
def test_poison_sets_every_bit_of_integers(dtype, value):
    assert (poison_(torch.zeros(5, dtype=dtype)) == value).all()


def test_bitwise_equal_sees_bits_not_values():
    x = torch.tensor([0.0, NAN, 1.0])
    assert bitwise_equal(x, x.clone())
    assert bitwise_equal(x[::2], torch.tensor([0.0, 1.0]))
    assert not bitwise_equal(x, torch.tensor([-0.0, NAN, 1.0]))
    assert not bitwise_equal(x, torch.tensor([0.0, NAN, 1.0 + 2**-23]))
    assert not bitwise_equal(x, x.double())
    assert not bitwise_equal(x, x[:2])


def test_selection_overlap_compares_sets_row_by_row():
    a = torch.tensor([[3, 1, 2, -1], [0, 1, 2, 3], [-1, -1, -1, -1], [5, 5, 5, 5], [7, -1, -1, -1]])
    b = torch.tensor([[1, 2, 3], [0, 1, 9], [-1, -1, -1], [5, 6, -1], [-1, -1, -1]])
    overlap = selection_overlap(a, b)
    assert overlap.dtype == torch.float64
    assert overlap.tolist() == [1.0, 0.5, 1.0, 0.5, 0.0]
    assert selection_overlap(a.reshape(5, 1, 4), b.reshape(5, 1, 3)).shape == (5, 1)
    with pytest.raises(ValueError, match=r"a has rows \(5,\), b has \(3,\)"):
        selection_overlap(a, b[:3])
