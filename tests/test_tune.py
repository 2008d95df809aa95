"""`dsv4lab.tune` with fake kernels, a fake SGLang and a fake clock; real are rules, tables and resumption."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import compiled_here
import pytest
import torch

from dsv4lab import hardware, numerics, records, timing, tune, tuned
from dsv4lab.kernels import choices, mqa_logits, sparse_mla, topk
from dsv4lab.kernels import fp8_gemm as fp8_gemm_of_ours
from dsv4lab.kernels.sparse_mla import plans
from dsv4lab.roofline import Work
from dsv4lab.timing import Replays
from dsv4lab.tune import candidates, compiling, fp8_gemm, moe, ours, sweep
from dsv4lab.tune.sweep import DEFAULT, Point

GPUS = {"sm_90": hardware.lookup("H200"), "sm_120": hardware.lookup("RTX PRO 6000 Blackwell")}
SHA = "a" * 64
ENVIRONMENT = records.Environment(
    gpu="NVIDIA H200",
    gpu_count=1,
    capability=(9, 0),
    driver="1",
    cuda="13",
    python="3.12",
    torch="2.11",
    triton="3.6.0",
)
TILE = candidates.tile(16, 64, 128, 1, 4, 4)


# the candidates


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("tp", [1, 8])
def test_candidates_fit_the_gpu_and_the_scales_and_are_not_too_many(gpu, tp):
    limits = dict(sms=gpu.sms, shared=gpu.shared_memory_per_block)
    found = {c.name: candidates.gemm(c.M, c.N, **limits) for c in fp8_gemm.cases(tp)}
    shared = gpu.shared_memory_per_block
    found |= {c.name: candidates.moe(c.M, experts=c.E, topk=c.topk, shared=shared) for c in moe.cases(tp)}
    assert len(found) == len(fp8_gemm.cases(tp)) + len(moe.cases(tp))
    for case, tried in found.items():
        assert 5 <= len(tried) <= 80, case
        for name, config in tried.items():
            assert candidates.name(config) == name and tuple(config) == candidates.KEYS
            m, n, k = (config[key] for key in candidates.KEYS[:3])
            assert 128 % k == 0 and (m + n) * k * (config["num_stages"] - 1) <= gpu.shared_memory_per_block


def test_a_small_batch_is_spread_over_more_blocks_than_by_default():
    blocks = [1536 // config["BLOCK_SIZE_N"] for config in candidates.gemm(32, 1536, sms=132, shared=232448).values()]
    assert max(blocks) > 132 // 2 > 1536 // 128


def test_every_weight_of_a_rank_is_tuned_once():
    shapes = {(case.N, case.K) for case in fp8_gemm.cases(8)}
    assert {(1536, 4096), (4096, 1024), (512, 4096), (4096, 256), (8192, 1024), (4096, 4096)} == shapes
    assert len({case.name for case in fp8_gemm.cases(8)}) == len(fp8_gemm.cases(8)) == 6 * len(fp8_gemm.ROWS)
    assert {case.weight for case in moe.cases(8)} == {(512, 4096), (4096, 256)}
    with pytest.raises(ValueError, match="tp must divide the 8 output groups, got 3"):
        fp8_gemm.cases(3)


# the sweep


@dataclass(frozen=True)
class Case:
    name: str


SPEED = {"slow": 30.0, "fast": 10.0, "faster": 9.0, "wrong": 1.0, "huge": 1.0, "refused": 1.0, None: 20.0}


def fake_prepare(choice, inputs):
    if choice == "refused":
        raise ValueError("no such tile")

    def call():
        return (inputs * (3.3 if choice == "wrong" else 3.0),)

    call.speed = SPEED[choice]
    return call


FAKE = SimpleNamespace(
    make_inputs=lambda case, *, device, seed, sets: [torch.arange(1.0, 9.0) for _ in range(sets)],
    reference=lambda x: (x * 3.0,),
    baseline=lambda x: ((x * 3.0).bfloat16().float(),),
    judge=lambda inputs, outputs, expected, usual: numerics.check(outputs[0], expected[0], usual[0]),
    prepare=fake_prepare,
    config=lambda case: {"M": 4},
    notes=lambda choice, inputs: {"tile": choice},
    work=lambda case: Work(1.0, 1e8),
    rotated_bytes=lambda case: 1e8,
)
CHOICES = {DEFAULT: None} | {name: name for name in ("slow", "fast", "faster", "wrong", "huge", "refused")}


class FakeCompiler:
    def __init__(self, *_):
        self.begun = []

    def begin(self, point):
        self.begun.append(point.name)

    def outcome(self, point, inputs):
        return {name: 10**6 if name == "huge" else 1000 for name in point.candidates}

    def close(self):
        pass


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A GPU that is a CPU; replays take what the launch says. Gives what was timed, in order."""
    timed = []

    def replay(variants, replays=50, *, budget_s, device):
        timed.append({name: len(launches) for name, launches in variants.items()})
        return Replays({name: [launches[0].speed] * 3 for name, launches in variants.items()}, {})

    monkeypatch.setattr(timing, "require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(timing, "graph_replay_us", replay)
    monkeypatch.setattr(timing, "clocks", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: ENVIRONMENT.gpu)
    monkeypatch.setattr(tune, "environment", lambda device: ENVIRONMENT)
    monkeypatch.setattr(
        hardware, "probe", lambda: {"sms": 132, "shared_memory_per_block": 232448, "capability": (9, 0)}
    )
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned"))
    return timed


@pytest.fixture
def target(monkeypatch, clock):
    """The target `fake`, of three points; `points` can be changed."""
    found = ModuleType("dsv4lab.tune.fake")
    found.all = [Point(f"m{m}", FAKE, Case(f"m{m}"), CHOICES, SHA, finalists=2) for m in (1, 2, 3)]
    found.points = lambda tp, **_: found.all
    found.write = lambda root, gpu, tp, kept: [root / f"{len(kept)}"]
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setattr(tune, "TARGETS", {"fake": tune.Target("tune_fake", "fake")})
    monkeypatch.setattr(tune, "Threads", FakeCompiler)
    return found


def run(tmp_path, **options):
    said = []
    outcome = tune.run(["fake"], directory=tmp_path / "records", say=said.append, **options)["fake"]
    return outcome, said


def test_only_what_is_right_and_fits_is_timed_and_the_best_again_with_the_default(target, clock, tmp_path):
    outcome, said = run(tmp_path)
    assert outcome.left == [] and outcome.record.name.startswith("tune_fake_h200_")
    found = records.read("tune_fake", tmp_path / "records")
    assert [(r.case, r.impl) for r in found[:3]] == [("m1", "faster"), ("m1", "fast"), ("m1", DEFAULT)]
    assert sweep.winner(found).impl == "faster"
    assert clock[0] == dict.fromkeys((DEFAULT, "slow", "fast", "faster"), 2)
    assert clock[1] == dict.fromkeys(("faster", "fast", DEFAULT), 2)
    first = found[0]
    assert first.config == {"M": 4, "cache": "cold", "tile": "faster"} and first.kernel_sha256 == SHA
    assert first.method["candidates"] == 7 and first.method["dropped"] == 3
    assert said[0] == "m1: faster 9.0 us, default 20.0 us (2.22x); 3 of 7 candidates dropped"


def test_the_best_of_each_kind_are_kept():
    point = Point("p", FAKE, Case("p"), CHOICES, SHA, kind=lambda choice: choice in ("slow", "huge"), finalists=1)
    assert sweep._best(point, {"fast": 1.0, "faster": 0.9, "slow": 9.0, DEFAULT: 99.0}) == ["faster", "slow", DEFAULT]


def test_a_run_that_is_cut_off_goes_on_where_it_was(target, clock, tmp_path, monkeypatch):
    whole = target.all[2]

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    broken = SimpleNamespace(**vars(FAKE) | {"make_inputs": interrupt})
    target.all[2] = Point("m3", broken, whole.case, CHOICES, SHA)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path)
    (partial,) = (tmp_path / "records").iterdir()
    assert partial.suffix == ".partial" and partial.name in caught.value.__notes__[0]
    with partial.open("a") as file:
        file.write('{"schema":1,"exper')  # the line it died in
    target.all[2] = whole
    clock.clear()
    outcome, said = run(tmp_path)
    assert [line.split(":")[0] for line in said] == ["m3"] and len(clock) == 2
    assert {r.case for r in records.read("tune_fake", tmp_path / "records")} == {"m1", "m2", "m3"}
    assert list((tmp_path / "records").iterdir()) == [outcome.record]


def spend(monkeypatch, points):
    """The budget is over after so many points."""
    asked = []
    monkeypatch.setattr(time, "monotonic", lambda: asked.append(1) or (0.0 if len(asked) < points + 2 else 99.0))


def test_a_budget_that_is_spent_leaves_the_rest_and_still_writes_tables(target, clock, tmp_path, monkeypatch):
    spend(monkeypatch, 1)
    outcome, _ = run(tmp_path, budget_s=50.0)
    assert outcome.left == ["m2", "m3"] and outcome.record.suffix == ".partial"
    assert outcome.tables[0].name == "3"  # the records of m1


@pytest.mark.parametrize("change", [{"triton": "3.7.0"}, {"gpu": "NVIDIA H100"}, {"sha256": "b" * 64}])
def test_what_was_measured_otherwise_is_not_taken_up(target, clock, tmp_path, monkeypatch, change):
    with monkeypatch.context() as early:
        spend(early, 1)
        run(tmp_path, budget_s=50.0)
    if sha256 := change.pop("sha256", None):
        target.all = [Point(p.name, FAKE, p.case, CHOICES, sha256) for p in target.all]
    monkeypatch.setattr(tune, "environment", lambda device: ENVIRONMENT.model_copy(update=change))
    monkeypatch.setattr("dsv4lab.journal.datetime", SimpleNamespace(now=lambda zone: records.datetime(2030, 1, 1)))
    _, said = run(tmp_path)
    assert [line.split(":")[0] for line in said] == ["m1", "m2", "m3"]


def test_a_point_without_a_right_candidate_is_left_and_said(target, clock, tmp_path):
    target.all = [Point("m1", FAKE, Case("m1"), {"wrong": "wrong", "huge": "huge"}, SHA)]
    outcome, said = run(tmp_path)
    assert outcome.left == ["m1"] and clock == []
    assert said[0].startswith("m1: no candidate of 2 is right: ")
    assert list((tmp_path / "records").iterdir()) == []


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        (["gemm"], {}, "there is no target 'gemm' to tune; known: fake"),
        ([], {"budget_s": 0}, "budget_s and jobs must be positive, got 0 and None"),
        ([], {"jobs": 0}, "budget_s and jobs must be positive, got 600.0 and 0"),
    ],
)
def test_a_wrong_argument_is_named(target, clock, names, options, says):
    with pytest.raises(ValueError, match=says):
        tune.run(names, **options)


def test_an_sglang_that_does_not_load_is_one_line(target, clock):
    target.points = lambda *_, **__: __import__("no_such_kernel_library")
    with pytest.raises(ValueError, match=r"SGLang does not load \(No module named 'no_such_kernel_library'\): pip "):
        tune.run([])


def test_without_sglang_its_kernels_cannot_be_tuned(monkeypatch, clock):
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="moe is a kernel of SGLang, which is not installed"):
        tune.run([])


# compiling in other processes


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    made = compiling.Processes("sm_90", jobs=1)
    yield made
    made.close()


def test_a_candidate_that_takes_its_process_down_takes_no_other(compiler):
    tried = {"b64": 64, "raises": "raises", "aborts": "aborts", "b128": 128}
    point = Point("p", compiled_here, 64, tried, SHA)
    compiler.begin(point)
    found = compiler.outcome(point, None)
    assert isinstance(found["b64"], int) and isinstance(found["b128"], int)
    assert isinstance(found["raises"], ValueError) and isinstance(found["aborts"], Exception)
    again = Point("q", compiled_here, 80, {"b64": 64}, SHA)  # a variant of the same: nothing is left to do
    before = dict(compiler.futures)
    compiler.begin(again)
    assert compiler.futures == before


def test_threads_compile_on_the_inputs_of_the_point(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import compiled_here\nfrom triton.runtime.driver import driver\n"
        "from dsv4lab.static import NamedTarget\nfrom dsv4lab.tune import compiling\n"
        "from dsv4lab.tune.sweep import Point\n"
        "driver.set_active(NamedTarget('sm_90'))\n"
        "point = Point('p', compiled_here, 64, {'a': 64, 'b': 128, 'c': 'raises'}, 'x')\n"
        "print(compiling.Threads(2).outcome(point, compiled_here.blank(64)))\n"
        "print(len(compiled_here.scale_kernel.device_caches[90][0]))\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "{'a': 0, 'b': 0, 'c': ValueError('no such tile')}\n2\n"


def test_compiling_processes_end_with_the_one_that_made_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom dsv4lab.tune import compiling\n"
        "if __name__ == '__main__':\n"
        "    pool = compiling.Processes('sm_90', 1).pool\n"
        "    pool.submit(int, 1).result()\n"
        "    print(list(pool._processes)[0], flush=True)\n"
        "    pool.submit(time.sleep, 600)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        worker = Path(f"/proc/{int(parent.stdout.readline())}")
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while worker.exists() and "Z" not in (worker / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not worker.exists() or (worker / "stat").read_text().split()[2] == "Z"


# SGLang's kernels


@pytest.fixture
def fake_sglang(monkeypatch):
    """Modules in the place of SGLang's, whose kernels are PyTorch; gives the configs that they were called with."""
    used = []
    gemm, kernels, configs = ModuleType(fp8_gemm.SGLANG), ModuleType(moe.SGLANG), ModuleType(moe._CONFIGS)
    gemm.__file__ = kernels.__file__ = __file__
    gemm.get_w8a8_block_fp8_configs = lambda N, K, block_n, block_k: None

    def matmul(x, w, x_scale, w_scale, block, dtype):
        table = gemm.get_w8a8_block_fp8_configs(len(w), w.shape[1], *block)
        used.append(table and table[min(table, key=lambda rows: abs(rows - len(x)))])
        return fp8_gemm.reference(fp8_gemm.Inputs(x, x_scale, w, w_scale))[0].to(dtype)

    def experts(A, B, C, B_scale, topk_weights, topk_ids, sorted_token_ids, expert_ids, top_k, config, **rest):
        x, x_scale = kernels.sglang_per_token_group_quant_fp8(A, 128)
        out, block = C.view(topk_ids.numel(), -1), config["BLOCK_SIZE_M"]
        for at, pair in enumerate(sorted_token_ids[: int(rest["num_tokens_post_padded"])].tolist()):
            if pair < topk_ids.numel():
                e, row = expert_ids[at // block], slice(pair // top_k, pair // top_k + 1)
                found = fp8_gemm.reference(fp8_gemm.Inputs(x[row], x_scale[row], B[e], B_scale[e]))[0][0]
                out[pair] = found * (topk_weights.flatten()[pair] if rest["mul_routed_weight"] else 1)
        used.append(config)

    gemm.w8a8_block_fp8_matmul_triton, kernels.invoke_fused_moe_kernel = matmul, experts
    kernels.sglang_per_token_group_quant_fp8 = kernels.per_token_group_quant_fp8 = None
    configs.get_global_server_args = None
    configs.try_get_optimal_moe_config = lambda *_, **__: (dict(TILE), (None, None))
    for module in (gemm, kernels, configs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return used


def test_the_gemm_is_called_as_sglang_calls_it_with_the_candidate_in_the_place_of_its_table(fake_sglang):
    (call,) = fp8_gemm.make_inputs(fp8_gemm.Case("small", 3, 256, 384), device="cpu")
    expected, usual = fp8_gemm.reference(call), fp8_gemm.baseline(call)
    wide = [call.w_scale[n // 128, k // 128] for n in range(256) for k in range(384)]
    w = call.w.double() * torch.stack(wide).view(256, 384)
    x = call.x.double() * call.x_scale.repeat_interleave(128, 1)
    assert numerics.relative_error(expected[0], x @ w.T) < 1e-6
    for choice in (None, TILE):
        outputs = fp8_gemm.prepare(choice, call)()
        assert outputs[0].dtype == torch.bfloat16
        assert fp8_gemm.judge(call, outputs, expected, usual).passed
    assert fake_sglang == [None, TILE]
    assert not fp8_gemm.judge(call, (outputs[0] * 1.02,), expected, usual).passed


@pytest.mark.parametrize("product", ["up", "down"])
@pytest.mark.parametrize("block", [2, 16])
def test_both_products_of_the_experts_get_sorted_pairs_and_quantised_rows(fake_sglang, product, block):
    case = moe.Case(product, 5, 128, E=7, topk=3, hidden=256)
    (call,) = moe.make_inputs(case, device="cpu")
    assert len(call.ids[0].unique()) == 3 and call.w.shape == (7, *case.weight)
    outputs = moe.prepare(TILE | {"BLOCK_SIZE_M": block}, call)()
    expected = moe.reference(call)
    assert expected[0].shape == (5, 3, case.weight[0])
    assert moe.judge(call, outputs, expected, moe.baseline(call)).passed
    assert fake_sglang[0]["BLOCK_SIZE_M"] == block


def test_pairs_are_sorted_into_whole_blocks_of_one_expert():
    case = moe.Case("up", 6, 128, E=4, topk=2, hidden=128)
    ids = torch.tensor([[0, 3], [3, 0], [3, 2], [0, 3], [3, 0], [0, 3]], dtype=torch.int32)
    pairs, owner, rows = moe.aligned(case, ids, 4)
    assert len(pairs) == 12 + 5 * 3 and int(rows) == 8 + 4 + 8
    assert owner.tolist()[:5] == [0, 0, 2, 3, 3]
    real = [[p for p in block if p < 12] for block in pairs[:20].view(5, 4).tolist()]
    assert sorted(p for block in real for p in block) == list(range(12))
    for block, expert in zip(real, owner.tolist(), strict=False):
        assert {int(ids.flatten()[p]) for p in block} == {expert}
    assert (pairs[20:] == 12).all()
    few = torch.tensor([[1, 2]], dtype=torch.int32)  # SGLang gives fewer pairs than experts a block each
    assert len(moe.aligned(moe.Case("up", 1, 128, E=4, topk=2, hidden=128), few, 4)[0]) == 8


def record(case, impl, us, **config):
    return records.Record(
        experiment="x", case=case, impl=impl, config=config, method={}, samples_us=[us], seed=0, argv=[],
        check={"error": 0.0, "baseline_error": 0.0, "tolerance": 1.0}, work={"flops": 1.0, "bytes": 1.0},
        date_utc="2030-01-01T00:00:00Z", git={"commit": None, "dirty": None}, kernel_sha256=SHA, env=ENVIRONMENT,
        clocks={"before": None, "after": None},
    )  # fmt: skip


def test_the_gemm_table_has_the_winner_where_one_was_measured_and_the_default_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_gemm, "default", lambda case: TILE | {"GROUP_SIZE_M": 32})
    better = TILE | {"BLOCK_SIZE_N": 32}
    found = [record("n1536_k4096_m32", DEFAULT, 20.0, **TILE), record("n1536_k4096_m32", "x", 9.0, M=32, **better)]
    (path,) = fp8_gemm.write(tmp_path, "NVIDIA H200", 1, found)
    name = "N=1536,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    assert path == tmp_path / "sglang" / "configs" / name
    table = json.loads(path.read_text())
    assert table.pop("32") == better and {int(m) for m in table} == set(fp8_gemm.ROWS) - {32}
    assert all(config == TILE | {"GROUP_SIZE_M": 32} for config in table.values())


def test_the_two_moe_tables_agree_on_the_rows_of_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "default", lambda case: TILE)
    monkeypatch.setattr(moe.triton, "__version__", "3.6.0")
    times = {("up", 16): 10.0, ("up", 64): 9.0, ("down", 16): 5.0, ("down", 64): 8.0, ("down", 32): 1.0}
    found = [
        record(f"e256_n256_{product}_m32", f"m{m}", us, **TILE | {"BLOCK_SIZE_M": m, "num_stages": m})
        for (product, m), us in times.items()
    ]
    paths = moe.write(tmp_path, "NVIDIA H200", 8, found)
    tail = "device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]"
    assert [path.name for path in paths] == [f"E=256,N=256,{tail}.json", f"E=256,N=256,{tail}_down.json"]
    assert {path.parent for path in paths} == {tmp_path / "sglang" / "configs" / "triton_3_6_0"}
    up, down = (json.loads(path.read_text()) for path in paths)
    assert up["32"]["num_stages"] == down["32"]["num_stages"] == 16
    assert up.keys() == down.keys() and up["16"] == TILE
    assert moe.write(tmp_path, "NVIDIA H200", 8, []) == []


def test_both_targets_of_sglang_end_in_its_tables(fake_sglang, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "Processes", FakeCompiler)
    monkeypatch.setattr(tune, "find_spec", lambda name: True)
    monkeypatch.setattr(fp8_gemm, "cases", lambda tp: [fp8_gemm.Case("", m, 256, 128) for m in (1, 4)])
    small = dict(E=4, topk=2, hidden=128)
    monkeypatch.setattr(moe, "cases", lambda tp: [moe.Case(p, m, 128, **small) for m in (1, 4) for p in ("up", "down")])
    monkeypatch.setattr(moe, "ROWS", (1, 4))
    monkeypatch.setattr(fp8_gemm, "default", lambda case: TILE)
    monkeypatch.setattr(candidates, "gemm", lambda *_, **__: {"quick": TILE | {"num_stages": 2}})
    monkeypatch.setattr(candidates, "moe", lambda *_, **__: {"quick": TILE | {"num_stages": 3}})
    monkeypatch.setattr(
        timing, "graph_replay_us",
        lambda variants, *_, **__: Replays({n: [1.0 if n == "quick" else 2.0] for n in variants}, {}),
    )  # fmt: skip
    outcomes = tune.run(["fp8-gemm", "moe"], tp=8, directory=tmp_path / "records", say=lambda text: None)
    assert list(outcomes) == ["moe", "fp8-gemm"] and not any(outcome.left for outcome in outcomes.values())
    for name, stages in (("fp8-gemm", 2), ("moe", 3)):
        assert len(outcomes[name].tables) == (1 if stages == 2 else 2)
        for path in outcomes[name].tables:
            table = json.loads(path.read_text())
            assert set(table) == {"1", "4"} and all(c == TILE | {"num_stages": stages} for c in table.values())
    assert len(tuned.sglang_tables(tuned.folder(), "NVIDIA H200")) == 3
    frame = records.to_frame(records.read("tune_moe", tmp_path / "records"))
    assert set(frame["num_stages"]) == {3, 4} and set(frame["product"]) == {"up", "down"}


# our kernels


def on_a_gpu(monkeypatch, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: ENVIRONMENT.gpu)
    choices._read.cache_clear()


@pytest.fixture
def root(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    yield tmp_path
    choices._read.cache_clear()


def attention_table(root):
    name, (_, config) = next((n, c) for n, c in sparse_mla.CANDIDATES.items() if c[0] == "split_k")
    found = [
        record("sparse_mla_b4_h8", DEFAULT, 5.0, H=8, B=4, s_q=1),
        record("sparse_mla_b4_h8", name, 4.0, H=8, B=4, s_q=1),
        record("sparse_mla_b64_h8", DEFAULT, 5.0, H=8, B=64, s_q=1),
        record("sparse_mla_b64_h8", name, 6.0, H=8, B=64, s_q=1),
    ]
    ours.write_attention(root, ENVIRONMENT.gpu, 8, found)
    return config


def test_the_plans_take_what_was_tuned_for_as_many_heads(root, monkeypatch):
    shipped = plans.choose("sm_90", 8, 64, "gluon").config
    config = attention_table(root)
    assert plans.choose("sm_90", 8, 1).config != config  # no GPU here
    on_a_gpu(monkeypatch)
    assert plans.choose("sm_90", 8, 4).config == plans.choose("sm_90", 8, 1).config == config
    assert all(plans.choose("sm_90", 8, rows, "gluon").config == shipped for rows in (5, 64, 10**6))
    assert plans.choose("sm_90", 8, 1).evidence == "tuned here, in h200.json"
    assert (
        plans.choose("sm_90", 12, 1) in plans.TABLE["sm_90"] and plans.choose("sm_120", 8, 1) in plans.TABLE["sm_120"]
    )
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert plans.choose("sm_90", 8, 1) in plans.TABLE["sm_90"]


def test_what_was_tuned_with_gluon_is_gluons_alone(root, monkeypatch):
    name, (_, config) = next((n, c) for n, c in sparse_mla.CANDIDATES.items() if c[0] == "gluon")
    here, elsewhere = (ours.attention_points(8, arch=arch)[0].candidates for arch in ("sm_90", "sm_120"))
    assert (here[DEFAULT], elsewhere[DEFAULT]) == ("gluon", "split_k")
    assert name in here and name not in elsewhere and elsewhere.items() - {(DEFAULT, "split_k")} <= here.items()
    ours.write_attention(root, ENVIRONMENT.gpu, 8, [record("sparse_mla_b4_h8", name, 4.0, H=8, B=4, s_q=1)])
    on_a_gpu(monkeypatch)
    assert plans.choose("sm_90", 8, 4, "gluon").config == config
    assert plans.choose("sm_90", 8, 4) in plans.TABLE["sm_90"]


def test_tuning_another_number_of_heads_keeps_what_there_is(root):
    attention_table(root)
    ours.write_attention(root, ENVIRONMENT.gpu, 1, [record("sparse_mla_b1_h64", DEFAULT, 1.0, H=64, B=1, s_q=1)])
    entries = tuned.read_kernels(root, ENVIRONMENT.gpu)["sparse_mla"]["entries"]
    assert [(e["heads"], e["max_rows"]) for e in entries] == [(8, 4), (8, plans.ANY), (64, plans.ANY)]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"sha256": SHA}, "made for another version of the kernel"),
        ({"triton": "2.0"}, "made with triton 2.0, and here is"),
    ],
)
def test_a_table_of_another_kernel_is_refused_aloud(root, monkeypatch, spoil, says):
    attention_table(root)
    table = tuned.read_kernels(root, ENVIRONMENT.gpu)["sparse_mla"]
    tuned.write_kernel(root, ENVIRONMENT.gpu, "sparse_mla", table | spoil)
    on_a_gpu(monkeypatch)
    with pytest.warns(UserWarning, match=f"tuned configs of sparse_mla are not used: {says}"):
        assert plans.choose("sm_90", 8, 1) in plans.TABLE["sm_90"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        plans.choose("sm_90", 8, 1)


@pytest.mark.parametrize("text", ["{", '{"gpu": "NVIDIA H100", "kernels": {}}', "[]"])
def test_a_broken_file_is_named_and_not_used(root, monkeypatch, text):
    (root / "h200.json").write_text(text)
    on_a_gpu(monkeypatch)
    with pytest.warns(UserWarning, match=r"h200\.json: .*tune again"):
        assert topk.plans.choose("sm_90") is topk.plans.TABLE["sm_90"]


def test_the_indexer_gets_what_is_best_over_all_cases(root, monkeypatch):
    names = [name for name, (impl, _) in mqa_logits.CANDIDATES.items() if impl == "triton"][:3]
    times = {ours.INDEXER_CASES[0]: (10.0, 1.0, 9.0), ours.INDEXER_CASES[1]: (10.0, 90.0, 9.0)}
    found = [
        record(f"mqa_logits_{case}", name, us, next_n=1)
        for case, all_us in times.items()
        for name, us in zip(names, all_us, strict=True)
    ]
    found.append(record(f"mqa_logits_{ours.SEVERAL}", names[0], 1.0, next_n=2))
    first = next(iter(topk.CANDIDATES))
    found += [
        record(f"topk_{ours.INDEXER_CASES[0]}", DEFAULT, 5.0),
        record(f"topk_{ours.INDEXER_CASES[0]}", first, 4.0),
    ]
    ours.write_indexer(root, ENVIRONMENT.gpu, 1, found)
    on_a_gpu(monkeypatch)
    choice = mqa_logits.plans.choose("sm_90")
    assert choice.single == mqa_logits.CANDIDATES[names[2]][1] and choice.several == mqa_logits.CANDIDATES[names[0]][1]
    assert topk.plans.choose("sm_90").config == topk.CANDIDATES[first][1]


def test_the_gemm_gets_a_config_for_every_number_of_rows_and_outputs(root, monkeypatch):
    gemm, (first, second) = fp8_gemm_of_ours, list(fp8_gemm_of_ours.CANDIDATES)[:2]
    rates = {(N, M): (1.0, 2.0) if N > 16384 else (4.0, 3.0) for N in (512, 32768) for M in gemm.plans.ROWS}
    found = [
        record(f"fp8_gemm_n{N}_k1024_m{M}", name, us, N=N, M=M)
        for (N, M), both in rates.items()
        for name, us in zip((first, second), both, strict=True)
    ]
    cut_off = [line for line in found if line.config["M"] < 64]
    assert ours.write_gemm(root, ENVIRONMENT.gpu, 1, cut_off) == []
    ours.write_gemm(root, ENVIRONMENT.gpu, 1, found)
    on_a_gpu(monkeypatch)
    for M in (1, 16, 17, 64):
        assert gemm.plans.choose("sm_90", M, 16384).config == gemm.CANDIDATES[second][1]
        assert gemm.plans.choose("sm_90", M, 32768).config == gemm.CANDIDATES[first][1]
    choices._read.cache_clear()
    ours.write_gemm(root, ENVIRONMENT.gpu, 8, [line for line in found if line.config["N"] == 512])
    assert gemm.plans.choose("sm_90", 64, 32768).config == gemm.CANDIDATES[second][1]  # a rank without a wide weight


def test_the_points_of_our_kernels_can_be_made_and_run():
    attention, indexer = ours.attention_points(8, arch="sm_90"), ours.indexer_points(8)
    assert {point.case.M for point in ours.gemm_points(8)} == set(fp8_gemm_of_ours.plans.ROWS)
    assert [p.case.H for p in attention] == [8] * len(ours.BATCHES)
    assert {p.module.EXPERIMENT for p in indexer} == {"mqa_logits", "topk"}
    for point in (attention[0], indexer[1], indexer[-1]):
        impl = point.candidates[DEFAULT]
        assert impl in point.module.IMPLEMENTATIONS and len(point.candidates) > 3
        assert point.module.rotated_bytes(point.case) > 0
    attention_case = attention[0].case
    (call,) = attention[0].module.make_inputs(attention_case, device="cpu")
    assert attention[0].module.rotated_bytes(attention_case) == pytest.approx(
        attention[0].module.work(attention_case).bytes - 2 * call.q.nbytes
    )
