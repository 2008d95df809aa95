"""A call laid out like an earlier one launches the same kernels on its own memory, and asks nobody how."""

import pytest
import torch

from dsv4lab.kernels import launch
from dsv4lab.kernels.replay import _place

pytest_plugins = ["compiler_on"]
LOADS = """
from dsv4lab.kernels.replay import _kept, replay
from dsv4lab.kernels import replay as module

driver.set_active(Loads("sm_90"))
seen, planned = Loads.seen, []

@triton.jit
def pair(x, y, n, m, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n + m + tl.load(y))

def run(x, y, n=5, key="", hidden=None):
    def call():
        planned.append(1)
        launch(pair, (2,), dict(x=x, y=y[4:] if hidden is None else hidden, n=n, m=len(x), BLOCK=8, num_warps=1))
    replay(call, (n, key), (x, None, y))

def fresh(rows=16):
    return torch.empty(rows), torch.empty(8)
"""


def test_only_addresses_differ_between_a_call_and_its_repetition(compiled):
    compiled(
        LOADS,
        """
    (a, b), (c, d) = fresh(), fresh()
    run(a, b), run(c, d)
    assert len(planned) == 1 and len(seen) == 2
    first, again = seen
    assert first[:3] == again[:3] == (2, 1, 1)
    assert [type(each) for each in first[9:11]] == [torch.Tensor] * 2 and first[11:] == again[11:] == (5, 16, 8)
    assert again[9:11] == (c.data_ptr(), d.data_ptr() + 16)
    assert first[3:6] == again[3:6] and first[7:9] == again[7:9]
    """,
    )


def test_no_tensor_is_kept(compiled):
    compiled(
        LOADS,
        """
    import weakref
    x, y = fresh()
    held = weakref.ref(x), weakref.ref(y)
    run(x, y)
    seen.clear()
    del x, y
    assert _kept and [each() for each in held] == [None, None]
    """,
    )


def test_another_layout_is_another_call(compiled):
    compiled(
        LOADS,
        """
    x, y = fresh()
    run(x, y)
    others = [
        dict(x=fresh(17)[0]), dict(x=torch.empty(16, dtype=torch.float64)), dict(x=torch.empty(32)[::2]), dict(n=6),
        dict(key="other"), dict(x=torch.empty(17)[1:]), dict(x=y.expand(2, 8).reshape(-1), y=torch.empty(9)[1:]),
    ]
    for count, other in enumerate(others, 2):
        run(**dict(x=x, y=y) | other), run(**dict(x=x, y=y) | other)
        assert len(planned) == count, other
    pool = torch.empty(32)
    run(x, pool), run(pool[:16], pool)  # the second has one address for both
    assert len(planned) == count + 2
    """,
    )


def test_what_cannot_be_repeated_is_planned_each_time(compiled):
    compiled(
        LOADS,
        """
    x, y = fresh()
    for _ in range(3):
        run(x, y, hidden=torch.empty(8))
    assert len(planned) == 3 and list(_kept.values()) == [None]
    """,
    )


def test_errors_are_not_kept_and_what_is_kept_has_an_end(compiled):
    compiled(
        LOADS,
        """
    x, y = fresh()
    for _ in range(2):
        assert "give it one config" in refusal(replay, lambda: warm(tuned, (1,), dict(x=x, n=5)), (), (x,))
    assert not _kept
    module.MOST = 2
    for n in (5, 6, 7):
        run(x, y, n)
    assert len(_kept) == 1
    """,
    )


def test_a_place_is_certain_or_none():
    pool, other = torch.empty(32), torch.empty(8)
    tensors = [pool[:8], None, pool[8:], other]
    starts = [0 if each is None else each.data_ptr() for each in tensors]
    assert _place(pool[8:12], tensors, starts) == (2, 0)
    assert _place(other[2:], tensors, starts) == (3, 8)
    assert _place(pool[16:], tensors, starts) is None  # of which of the two?
    assert _place(torch.empty(4), tensors, starts) is None


def test_recording_ends_with_its_block():
    with launch.recorded() as outer:
        with launch.recorded() as inner, pytest.raises(TypeError):
            launch.launch(None, (1,), {})
    assert outer == inner == []
