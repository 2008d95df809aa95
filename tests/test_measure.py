"""`measure.run` on a fake kernel module and a fake clock: everything but the GPU."""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dsv4lab import kernels, measure, numerics, records, timing
from dsv4lab.plot import tables
from dsv4lab.roofline import Work
from dsv4lab.timing import Ceiling, Replays

SCALE = 3.0
ENVIRONMENT = records.Environment(
    gpu=None, gpu_count=0, capability=None, driver=None, cuda=None, python="3.12", torch="2.11", triton=None
)


@dataclass(frozen=True)
class Case:
    name: str
    B: int
    H: int
    kv_bytes: int = 40_000_000


def _reference(inputs, dtype=torch.float64):
    """A stand-in for attention with its result shapes: out [B, s_q, H, 512], lse [B, H, s_q]; row 0 has no keys."""
    out = inputs.q.to(dtype) * SCALE
    lse = inputs.q.to(dtype).sum(-1).transpose(1, 2).clone()
    out[0], lse[0] = 0, torch.inf
    return out, lse


def _prepare(impl, inputs):
    if impl == "broken":
        raise RuntimeError("no such instruction\nsecond line")
    if impl == "capped" and inputs.q.shape[0] > 2:
        raise ValueError("B must be at most 2 here, got 4")
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[0], inputs.q.shape[2], inputs.q.shape[1])

    def launch():
        right = _reference(inputs, torch.float32)
        written = slice(None, -1) if impl == "lazy" else slice(None)
        out[written] = right[0][written].to(out.dtype) * (1.1 if impl == "wrong" else 1)
        lse.copy_(right[1] + (0.3 if impl == "wrong_lse" else 0))
        if impl == "finite_lse":
            lse[0] = 0
        return out, lse

    return launch


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The module `dsv4lab.kernels.fake`, a GPU that is a CPU, and a clock that launches once and counts."""
    module = ModuleType(f"{kernels.__name__}.fake")
    source = tmp_path / "fake.py"
    source.write_text("'the kernel'")
    module.__file__ = str(source)
    module.EXPERIMENT = "fake_decode"
    module.CASES = {case.name: case for case in (Case("small", 2, 4), Case("large", 4, 4), Case("tiny", 2, 1, 1000))}
    module.IMPLEMENTATIONS = {"good": None, "other": None}
    module.CANDIDATES = {"good_wide": None}
    module.notes = lambda impl, inputs: {"variant": f"{impl}_variant"}
    module.config = lambda case: {"B": case.B, "H": case.H}
    module.work = lambda case: Work(1e6, case.kv_bytes + 2 * 2 * case.B * case.H * 512)
    module.make_inputs = lambda case, *, device, seed, sets=1: [
        SimpleNamespace(
            q=torch.randn(case.B, 1, case.H, 512, generator=torch.Generator().manual_seed(seed + each)).bfloat16(),
            attn_sink=torch.ones(case.H),
        )
        for each in range(sets)
    ]
    module.reference = _reference
    module.baseline = lambda inputs: _reference(inputs, torch.bfloat16)
    module.prepare = _prepare
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(timing, "require_gpu", lambda device: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(timing, "clocks", lambda device: {"sm_mhz": 1980.0})
    monkeypatch.setattr(measure, "environment", lambda device: ENVIRONMENT)
    monkeypatch.setattr(timing, "ceilings", lambda device: {"read": Ceiling([510.0], Work(0.0, 2e9), 0.0, 0.0)})
    timed, slow = [], {}

    def replay(variants, replays=50, *, budget_s=10.0, device):
        if replays == 1:
            return Replays({name: [slow.get(name, 12.0)] for name in variants}, {})
        timed.append({name: len(launches) for name, launches in variants.items()})
        for launches in variants.values():
            for launch in launches:
                launch()
        return Replays({name: [10.0, 11.0, 12.0] for name in variants}, {})

    monkeypatch.setattr(timing, "graph_replay_us", replay)
    return SimpleNamespace(module=module, timed=timed, slow=slow, directory=tmp_path / "records")


def _run(fake, **options):
    return measure.run("fake", directory=fake.directory, **options)


def _files(fake):
    return sorted(path.name for path in fake.directory.iterdir())


def test_one_run_is_one_file_with_its_own_ceilings(fake):
    path = _run(fake, cases=["small", "large"])
    assert _files(fake) == [path.name]
    found = records.read("fake_decode", fake.directory)
    assert {(r.case, r.impl, r.config.get("cache")) for r in found} == {
        (measure.CEILINGS, "read", None),
        *((case, impl, cache) for case in ("small", "large") for impl in ("good", "other") for cache in measure.CACHES),
    }
    kernel = next(r for r in found if r.case == "small")
    assert kernel.config == {"B": 2, "H": 4, "cache": "cold", "variant": "good_variant"}
    assert kernel.check["error"] <= kernel.check["tolerance"] and kernel.check["lse_error"] < 1e-6
    assert kernel.clocks.before == kernel.clocks.after == {"sm_mhz": 1980.0} and kernel.env == ENVIRONMENT
    assert kernel.kernel_sha256 == measure.kernel_hash(fake.module)
    assert measure.CEILINGS == tables.CEILINGS


def test_a_sweep_measures_the_candidates_as_an_experiment_of_its_own(fake):
    path = _run(fake, cases=["small"], sweep=True)
    assert path.name.startswith("fake_decode_sweep_")
    found = [r for r in records.read("fake_decode_sweep", fake.directory) if r.case == "small"]
    assert {(r.impl, r.config["variant"]) for r in found} == {("good_wide", "good_wide_variant")}
    with pytest.raises(ValueError, match="impls has no 'good'; known: good_wide"):
        _run(fake, impls=["good"], sweep=True)


def test_cold_rotates_sets_and_warm_replays_one(fake):
    _run(fake, cases=["small"], impls=["good"])
    assert fake.timed == [{"good": timing.MIN_SETS}, {"good": timing.WARM_CALLS}]
    cold, warm = (r.method for r in records.read("fake_decode", fake.directory) if r.case == "small")
    assert cold["sets"] == cold["calls"] == timing.MIN_SETS
    assert cold["rotated_bytes"] >= timing.ROTATION_BYTES
    assert (warm["sets"], warm["calls"], warm["rotated_bytes"]) == (1, timing.WARM_CALLS, 0)


@pytest.mark.parametrize(
    ("us", "budget_s", "calls", "cache"),
    [(30_000, 0.1, 5, "cold"), (60_000, 10.0, 2, "rotated"), (60_000, 1.0, 1, "rotated"), (1e6, 10.0, 1, "rotated")],
)
def test_a_slow_variant_gets_few_calls_and_is_called_cold_only_if_it_is(us, budget_s, calls, cache, fake):
    fake.slow["other"] = us
    _run(fake, cases=["small"], budget_s=budget_s)
    assert fake.timed[0] == {"good": timing.MIN_SETS, "other": calls}
    cold, warm = (r for r in records.read("fake_decode", fake.directory) if r.impl == "other")
    assert (cold.config["cache"], cold.method["sets"], cold.method["rotated_bytes"]) == (cache, calls, calls * 4e7)
    assert cold.method["calls"] == calls and warm.config["cache"] == "warm" and warm.method["calls"] < timing.WARM_CALLS


def test_a_variant_that_does_not_take_a_case_is_named_and_fails_nothing(fake, capsys):
    fake.module.IMPLEMENTATIONS["capped"] = None
    _run(fake, cases=["small", "large"], impls=["good", "capped"], cache=["cold"])
    assert "large without capped: B must be at most 2 here, got 4" in capsys.readouterr().err
    found = {(r.case, r.impl) for r in records.read("fake_decode", fake.directory)}
    assert ("small", "capped") in found and ("large", "capped") not in found and ("large", "good") in found


def test_a_run_in_which_nothing_applies_says_so(fake):
    fake.module.IMPLEMENTATIONS = {"capped": None}
    with pytest.raises(measure.CheckFailed, match="nothing could be measured: no implementation takes the case"):
        _run(fake, cases=["large"])
    assert _files(fake) == []


@pytest.fixture
def judging(fake):
    """The same module with a verdict of its own, on outputs that are one tensor, and its own count of rotated bytes."""

    def judge(inputs, outputs, expected, usual):
        (out,) = outputs
        error = (out.double() - expected[0]).abs().max().item()
        return numerics.Check(error, 0.0, 0.5, error <= 0.5)

    fake.module.judge = judge
    fake.module.rotated_bytes = lambda case: 1000.0
    fake.module.prepare = lambda impl, inputs: partial(lambda launch: launch()[:1], _prepare(impl, inputs))
    return fake


def test_a_module_with_a_judge_is_judged_by_it(judging):
    judging.module.IMPLEMENTATIONS["wrong"] = None
    with pytest.raises(measure.CheckFailed, match="small wrong: CheckFailed: out has error"):
        _run(judging, cases=["small"], cache=["cold"])
    record = next(r for r in records.read("fake_decode", judging.directory) if r.impl == "good")
    assert record.check.keys() == {"error", "baseline_error", "tolerance", "passed"}
    assert record.method["rotated_bytes"] == timing.MAX_SETS * 1000 and record.config["cache"] == "rotated"


def test_what_a_judge_sees_was_poisoned_before(judging):
    judging.module.IMPLEMENTATIONS["lazy"] = None
    with pytest.raises(measure.CheckFailed, match="small lazy"):
        _run(judging, cases=["small"], cache=["cold"])


def test_what_is_too_small_to_be_cold_is_not_called_cold(fake):
    _run(fake, cases=["tiny"], impls=["good"], cache=["cold"])
    assert records.read("fake_decode", fake.directory)[-1].config["cache"] == "rotated"
    assert fake.timed == [{"good": timing.MAX_SETS}]


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ("wrong", "out has error 1.00e-01"),
        ("lazy", "out has error inf"),
        ("wrong_lse", "lse has error"),
        ("finite_lse", "lse of a row without keys is not infinite"),
        ("broken", "RuntimeError: no such instruction"),
    ],
)
def test_a_failing_variant_is_named_and_not_timed_and_the_rest_is_kept(impl, reason, fake, capsys):
    fake.module.IMPLEMENTATIONS[impl] = None
    with pytest.raises(measure.CheckFailed, match="the rest is in") as caught:
        _run(fake, cases=["small", "large"], cache=["cold"])
    assert "small" in str(caught.value) and "large" in str(caught.value) and reason in str(caught.value)
    assert "second line" not in str(caught.value)
    assert f"FAILED small {impl}: " in capsys.readouterr().err
    assert fake.timed == [{"good": timing.MIN_SETS, "other": timing.MIN_SETS}] * 2
    assert {r.impl for r in records.read("fake_decode", fake.directory)} == {"read", "good", "other"}
    assert not [name for name in _files(fake) if name.endswith(".partial")]


def test_a_run_in_which_nothing_passed_leaves_no_file(fake):
    fake.module.IMPLEMENTATIONS = {"wrong": None}
    with pytest.raises(measure.CheckFailed, match="nothing could be measured: small wrong"):
        _run(fake, cases=["small"])
    assert _files(fake) == [] and fake.timed == []


def _die_at(fake, case, error):
    make = fake.module.make_inputs

    def make_inputs(each, **options):
        if each.name == case:
            raise error
        return make(each, **options)

    fake.module.make_inputs = make_inputs


@pytest.mark.parametrize("error", [MemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_what_was_measured_before_a_crash_is_readable_and_named(error, fake, capsys):
    _die_at(fake, "large", error)
    with pytest.raises(type(error)) as caught:
        _run(fake, cases=["small", "large"])
    (name,) = _files(fake)
    assert name.startswith("fake_decode_cpu_") and name.endswith(".partial")
    assert name in caught.value.__notes__[0] and name in capsys.readouterr().err
    lines = (fake.directory / name).read_text().splitlines()
    assert {records.Record.model_validate_json(line).case for line in lines} == {measure.CEILINGS, "small"}
    with pytest.raises(FileNotFoundError):
        records.read("fake_decode", fake.directory)


def test_a_crash_before_the_first_case_leaves_no_file(fake):
    _die_at(fake, "small", MemoryError())
    with pytest.raises(MemoryError):
        _run(fake, cases=["small"])
    assert _files(fake) == []


def _peer(fake, monkeypatch, *, reason=None, with_sink=True):
    def prepare(inputs):
        launch = _prepare("good", inputs)

        def with_its_sink():
            out, lse = launch()
            lse = torch.where(lse == torch.inf, -torch.inf, lse)
            return out, torch.logaddexp(lse, inputs.attn_sink[:, None])

        return with_its_sink

    peer = ModuleType("tests.fake_peer")
    peer.__file__ = fake.module.__file__
    peer.IMPL, peer.LSE_INCLUDES_SINK = "rival", with_sink
    peer.unavailable = lambda: reason
    peer.notes = lambda inputs: {"h_padded": 64}
    peer.prepare = prepare
    monkeypatch.setitem(sys.modules, peer.__name__, peer)
    monkeypatch.setattr(measure, "peers_of", lambda experiment: [peer])


def test_peers_are_timed_in_the_same_run_and_carry_their_notes(fake, monkeypatch):
    _peer(fake, monkeypatch)
    _run(fake, cases=["small"], impls=["good"], peers=True, cache=["cold"])
    assert fake.timed == [{"good": timing.MIN_SETS, "rival": timing.MIN_SETS}]
    assert records.read("fake_decode", fake.directory)[-1].config == {"B": 2, "H": 4, "cache": "cold", "h_padded": 64}


def test_a_peer_is_judged_by_its_own_convention_for_the_sink(fake, monkeypatch):
    _peer(fake, monkeypatch, with_sink=False)
    with pytest.raises(measure.CheckFailed, match="small rival: CheckFailed: lse has error"):
        _run(fake, cases=["small"], impls=["good"], peers=True, cache=["cold"])


def test_an_absent_peer_is_named_and_does_not_fail_the_run(fake, monkeypatch, capsys):
    _peer(fake, monkeypatch, reason="rival is not installed: pip install rival")
    _run(fake, cases=["small"], peers=True, cache=["cold"])
    assert "without rival: rival is not installed: pip install rival" in capsys.readouterr().err


def test_a_variant_that_cannot_be_captured_does_not_lose_the_others(fake, monkeypatch):
    def replay(variants, *replays, **options):
        return Replays({"good": [10.0]}, {"other": "it synchronises"})

    monkeypatch.setattr(timing, "graph_replay_us", replay)
    with pytest.raises(measure.CheckFailed, match="small other: TimingFailed: it synchronises"):
        _run(fake, cases=["small"], cache=["cold"])
    assert {r.impl for r in records.read("fake_decode", fake.directory)} == {"read", "good"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"cases": ["huge"]}, "cases has no 'huge'; known: small, large, tiny"),
        ({"cases": []}, "cases has no ''; known: small"),
        ({"impls": ["best"]}, "impls has no 'best'; known: good, other"),
        ({"cache": ["hot"]}, "cache has no 'hot'; known: cold, warm"),
    ],
)
def test_names_that_do_not_exist_are_refused_before_anything_runs(options, complaint, fake):
    with pytest.raises(ValueError, match=complaint):
        _run(fake, **options)
    assert not fake.directory.exists()


def test_unknown_modules_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"stem 'sparse_mlb' is no kernel module with cases; known: .*sparse_mla"):
        measure.kernel_module("sparse_mlb")


def test_a_directory_that_cannot_be_written_is_refused_before_anything_runs(fake, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        measure.run("fake", directory=tmp_path / "file")
    assert fake.timed == []


def test_refuses_to_run_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        measure.run("sparse_mla", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_measures_the_real_kernels_and_whatever_rival_is_here(tmp_path):
    path = measure.run("sparse_mla", cases=["b4_h8"], peers=True, directory=tmp_path, budget_s=0.5)
    frame = records.to_frame(records.read("sparse_mla_decode", tmp_path))
    assert set(frame["file"]) == {path.name}
    assert {"cold", "warm"} <= set(frame["cache"])
    assert tables.ceilings(frame).dram_bytes_per_s > 0
    assert asdict(tables.ceilings(frame))["source"].endswith("in the same run")
