import subprocess
from types import SimpleNamespace

import pytest
import torch

from dsv4lab import timing


def test_rotation_covers_the_promised_bytes_and_twice_the_cache():
    kv = 640 * 584
    assert timing.rotation_sets(kv) * kv >= timing.ROTATION_BYTES > (timing.rotation_sets(kv) - 1) * kv
    assert timing.rotation_sets(kv, l2_bytes=128 << 20) * kv >= 2 * (128 << 20)
    assert timing.rotation_sets(128 * kv) == timing.MIN_SETS
    assert timing.rotation_sets(100) == timing.MAX_SETS
    with pytest.raises(ValueError, match="bytes_per_call must be positive, got 0"):
        timing.rotation_sets(0)


def test_slow_variants_get_fewer_replays_within_the_budget():
    counts = timing.replay_counts({"fast": 0.5, "slow": 100.0, "glacial": 1e5}, replays=50, budget_s=6.0)
    assert counts == {"fast": 50, "slow": 10, "glacial": timing.MIN_REPLAYS}


def test_rounds_rotate_the_order_and_spread_the_rare_ones():
    orders = list(timing.rounds({"a": 6, "b": 6, "rare": 2}))
    assert orders[:2] == [["a", "b"], ["b", "a"]]
    assert [index for index, order in enumerate(orders) if "rare" in order] == [2, 5]
    assert [sum(name in order for order in orders) for name in ("a", "b", "rare")] == [6, 6, 2]
    assert {order[0] for order in timing.rounds({"a": 3, "b": 3, "c": 3})} == {"a", "b", "c"}
    assert list(timing.rounds({})) == []


def test_refuses_without_a_gpu_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (lambda: timing.graph_replay_us({"a": [print]}), timing.ceilings, lambda: timing.require_gpu("cpu")):
        with pytest.raises(RuntimeError, match=r"^timing needs a CUDA GPU.*no GPU$"):
            call()


def _fake_smi(monkeypatch, answer):
    monkeypatch.setattr(timing.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(timing.subprocess, "run", answer)


def test_clocks_are_read_from_the_device_itself(monkeypatch):
    asked = []

    def answer(command, **options):
        asked.extend(command)
        return SimpleNamespace(stdout="1980, 3201, 41, [N/A]\n")

    _fake_smi(monkeypatch, answer)
    assert timing.clocks() == {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 41.0, "power_w": None}
    assert "--id=GPU-1-2" in asked


def test_clocks_are_none_where_the_tool_is_absent_or_fails(monkeypatch):
    def fail(command, **options):
        raise subprocess.CalledProcessError(9, command)

    _fake_smi(monkeypatch, fail)
    assert timing.clocks() is None
    monkeypatch.setattr(timing.shutil, "which", lambda name: None)
    assert timing.clocks() is None


@pytest.mark.gpu
def test_replays_every_launch_of_every_variant_and_keeps_the_good_ones():
    counters = torch.zeros(3, dtype=torch.int64, device="cuda")
    variants = {
        "one": [lambda: counters[0].add_(1)],
        "two_sets": [lambda: counters[1].add_(1), lambda: counters[2].add_(1)],
        "syncs": [lambda: counters.sum().item()],
    }
    timed = timing.graph_replay_us(variants, replays=7)
    assert {name: len(samples) for name, samples in timed.samples_us.items()} == {"one": 7, "two_sets": 7}
    assert min(map(min, timed.samples_us.values())) > 0
    assert list(timed.errors) == ["syncs"] and timed.errors["syncs"]
    first, *two = counters.tolist()
    assert two == [first, first] == [1 + 2 * (1 + 7)] * 2  # eager once, then an untimed and a timed replay each time
    assert torch.randn(8, device="cuda").isfinite().all()  # the broken capture left nothing behind


@pytest.mark.gpu
def test_a_variant_must_have_launches():
    with pytest.raises(ValueError, match="'none' has none"):
        timing.graph_replay_us({"none": []})


@pytest.mark.gpu
def test_ceilings_are_checked_before_they_are_believed():
    measured = timing.ceilings()
    assert set(measured) == {"copy", "read", "bf16_matmul", "empty_kernel"}
    for ceiling in measured.values():
        assert ceiling.error <= ceiling.tolerance
        assert min(ceiling.samples_us) > 0
