import gzip
import json
import math
import socket
import threading
import time
from dataclasses import replace

import pytest

from dsv4lab import cli, hardware, records, trace
from dsv4lab.files import locked, write_atomically
from dsv4lab.serving import bench, campaign, http, launch, load, meeting, presets, profile, stages
from dsv4lab.serving.launch import Server
from dsv4lab.serving.load import Shape
from dsv4lab.serving.stages import Plan

pytest_plugins = ["one_h200"]
pytestmark = pytest.mark.usefixtures("one_h200")

LEGS = stages.LEGS


@pytest.fixture(autouse=True)
def two_concurrencies(monkeypatch):
    few = {name: replace(leg, concurrency=(1, 2)) if leg.concurrency else leg for name, leg in LEGS.items()}
    monkeypatch.setattr(stages, "LEGS", few)
    monkeypatch.setattr(campaign, "TRACED_BATCH", 2)


def walk(plan: Plan, *stages: str) -> tuple[bool, list[str]]:
    said: list[str] = []
    return campaign.run(plan, stages, said.append), said


def lines(plan: Plan, name: str) -> list[dict]:
    return [json.loads(line) for line in (plan.out / f"{name}.jsonl").read_text().splitlines()]


def raw(plan: Plan, run: str) -> dict:
    (path,) = (plan.out / "runs" / run / "traces").glob("*/*")
    return json.loads(gzip.decompress(path.read_bytes()))


def test_a_stage_leaves_records_and_a_trace(plan):
    good, said = walk(plan, "indexer")
    assert good, said
    assert said[-1].startswith("recorded: ")
    start, *measured = lines(plan, "indexer")
    assert (start["case"], start["result"], start["check"]["passed"]) == ("start", {"graph_gb": 0.35}, True)
    assert start["server"]["hooks"] == str(presets.find("indexer").setting)
    assert start["server"]["hooks"].startswith("attention=gluon,indexer=triton,topk=triton,mhc=split_k,")
    for line, concurrency in zip(measured, (1, 2), strict=True):
        assert (line["experiment"], line["impl"], line["case"]) == ("serving", "indexer", f"c{concurrency}_in8_out4")
        shared = {"context_length": 1_048_576, "layers": 6, "tp": 1}
        assert line["config"] == {"stage": "indexer", "C": concurrency} | shared
        assert line["check"] == {"ok": 3 * concurrency, "failed": 0, "passed": True, "errors": []}
        assert len(line["samples_us"]) == 3 and line["result"]["output_tok_s"] > 0
    frame = records.to_frame(records.read("serving", plan.out / "records"))
    assert list(frame["C"].dropna()) == [1, 2]
    reduced = trace.read(plan.out / "traces" / "indexer_graph.trace.jsonl.gz")
    assert list(reduced.events["dur"]) == [2500]
    about = {"stage": "indexer", "mode": "graph", "graphs": True, "batch": 2, "sglang": "0.5.14"} | shared
    assert about.items() <= reduced.meta.items()
    asked = raw(plan, "indexer")["asked"]
    assert (asked["num_steps"], asked["with_stack"], asked["record_shapes"]) == (4, False, False)


def test_the_eager_profile_is_of_a_second_server_without_graphs(plan):
    _, said = walk(replace(plan, eager=True), "indexer", "native")
    assert not any("no eager" in text or "stays as it is" in text for text in said), said
    traces = sorted(path.name for path in (plan.out / "traces").iterdir())
    assert traces == [f"{name}.trace.jsonl.gz" for name in ("indexer_eager", "indexer_graph", "native_graph")]
    asked = raw(plan, "indexer_eager")["asked"]
    assert asked["with_stack"] and asked["record_shapes"]
    started = json.loads((plan.out / "runs" / "indexer_eager" / "started.json").read_text())
    assert "--disable-cuda-graph" in started["argv"]


def test_what_is_done_is_not_done_again(plan):
    walk(plan, "native")
    before = (plan.out / "native.jsonl").read_bytes()
    good, said = walk(plan, "native", "native_auto")
    assert good and "native: done before" in said[0]
    assert (plan.out / "native.jsonl").read_bytes() == before
    newest = max((plan.out / "records").iterdir())
    assert {json.loads(line)["impl"] for line in newest.read_text().splitlines()} == {"native", "native_auto"}


def test_what_ends_a_stage_is_recorded_and_the_next_one_goes_on(plan, monkeypatch):
    monkeypatch.setenv("FAKE", "crash-compiling")
    good, said = walk(plan, "compile", "native")
    assert good  # that compiling ends it is an answer
    (line,) = lines(plan, "compile")
    assert (line["case"], line["check"]["passed"]) == ("start", False)
    assert "torch.OutOfMemoryError: CUDA out of memory" in line["check"]["errors"][0]
    assert "--enable-torch-compile is on" in line["check"]["errors"][0]
    assert len(lines(plan, "native")) == 3
    assert any("compile: failed: the server ended with status 1" in text for text in said)


def test_a_stage_that_should_have_started_is_tried_again(plan, monkeypatch):
    monkeypatch.setenv("FAKE", "crash")
    good, _ = walk(plan, "native")
    assert not good and not campaign.done(plan, "native")
    assert lines(plan, "native.failed")[0]["check"]["failed"] == 1
    monkeypatch.setenv("FAKE", "")
    assert walk(plan, "native")[0]
    assert not (plan.out / "native.failed.jsonl").exists()


def test_what_was_measured_before_a_failure_outlives_a_next_start_that_is_killed(plan, monkeypatch):
    def dies(*_, **__):
        raise http.NoAnswer("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign._Stage, "_profile", dies)
        assert not walk(plan, "native")[0]
    measured = lines(plan, "native.failed")[1:3]
    assert [line["config"]["C"] for line in measured] == [1, 2]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Server, "start", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        walk(plan, "native")
    assert lines(plan, "native.partial") == measured


def test_a_stage_of_open_end_that_could_not_be_tried_is_not_done(plan):
    with socket.socket() as other:
        other.bind(("127.0.0.1", plan.port))
        other.listen()
        assert not walk(plan, "compile")[0]
    assert not campaign.done(plan, "compile")
    assert "cannot be had" in lines(plan, "compile.failed")[0]["check"]["errors"][0]
    assert walk(plan, "compile")[0] and len(lines(plan, "compile")) == 3


@pytest.mark.parametrize("where", ["bench.measure", "profile.steady", "trace.reduce"])
def test_an_error_that_nobody_thought_of_ends_no_more_than_it_must(plan, monkeypatch, where):
    def broken(*_, **__):
        raise AttributeError("no such thing")

    monkeypatch.setattr(f"dsv4lab.serving.campaign.{where}", broken)
    good, said = walk(plan, "native", "native_auto")
    assert good == (where != "bench.measure")
    assert sum("AttributeError: no such thing" in text for text in said) == 2
    if good:
        assert len(lines(plan, "native_auto")) == 3
    else:
        assert "AttributeError" in lines(plan, "native_auto.failed")[1]["check"]["errors"][0]


def test_graph_memory_that_is_not_told_is_no_number(plan, monkeypatch):
    monkeypatch.setattr(campaign.server_record, "account", lambda info: {"memory_gb": [None]})
    walk(plan, "native")
    assert lines(plan, "native")[0]["result"] == {"graph_gb": None}


def test_failed_requests_are_recorded_and_make_the_stage_bad(plan, monkeypatch):
    monkeypatch.setenv("FAKE", "refuses-load")
    good, said = walk(plan, "native")
    assert not good and campaign.done(plan, "native")
    assert [line["check"]["passed"] for line in lines(plan, "native")] == [True, False, False]
    assert any("no graph profile: a request failed before all requests decoded: HTTP 500" in text for text in said)


def test_without_a_trace_the_numbers_stay_and_it_may_come_later(plan, monkeypatch):
    monkeypatch.setenv("FAKE", "no-trace")
    monkeypatch.setattr(profile, "_OUTPUT", 20)
    good, said = walk(plan, "native")
    assert good and any("no graph profile: the requests ended while the trace was awaited" in text for text in said)
    before = (plan.out / "native.jsonl").read_bytes()
    monkeypatch.setenv("FAKE", "")
    monkeypatch.setattr(profile, "_OUTPUT", 2048)
    assert walk(plan, "native")[0]
    assert (plan.out / "traces" / "native_graph.trace.jsonl.gz").is_file()
    assert (plan.out / "native.jsonl").read_bytes() == before and (plan.out / "runs" / "native_graph").is_dir()


def test_the_budget_ends_a_campaign_between_stages_and_within_them(plan, monkeypatch):
    good, said = walk(replace(plan, budget_s=1.0), "native")
    assert not good and "not begun, the time is over" in said[0]
    monkeypatch.setattr(campaign, "LEAST_S", 0.5)
    cut = replace(plan, shape=Shape(8, 400), waves=1, budget_s=3.6)  # 400 tokens take 2 s and more
    good, said = walk(cut, "native")
    assert not good and any("native: cut off, the time is over" in text for text in said)
    before = lines(plan, "native.partial")
    assert [line["case"] for line in before] == ["start", "c1_in8_out400"]
    assert walk(replace(cut, budget_s=60.0), "native")[0] and not (plan.out / "native.partial.jsonl").exists()
    after = lines(plan, "native")
    assert [line["config"]["C"] for line in after] == [1, None, 2] and after[0] == before[1]


def test_an_eager_profile_can_come_later(plan):
    walk(plan, "indexer")
    before = (plan.out / "indexer.jsonl").read_bytes()
    assert walk(replace(plan, eager=True), "indexer")[0]
    assert (plan.out / "traces" / "indexer_eager.trace.jsonl.gz").is_file()
    assert (plan.out / "indexer.jsonl").read_bytes() == before


def test_a_trace_is_taken_only_whole(tmp_path):
    path, data = tmp_path / "x.trace.json.gz", gzip.compress(b"1" * 10_000_000)
    assert not profile.is_whole(path)
    for cut, whole in ((0, True), (5, False), (len(data) // 2, False)):
        path.write_bytes(data[: len(data) - cut])
        assert profile.is_whole(path) is whole


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layers": 4}, "layers is 4, and out has native with 6: take another out"),
        ({"context_length": 8192}, "context_length is 8192, and out has native with 1048576"),
        ({"shape": Shape(8, 5)}, "output is 5, and out has native with 4"),
        ({"waves": 2}, "waves is 2, and out has native with 3"),
    ],
)
def test_one_folder_holds_one_kind_of_measurement(plan, changed, says):
    walk(plan, "native")
    with pytest.raises(ValueError, match=says):
        walk(replace(plan, **changed), "indexer", "native")
    assert not (plan.out / "indexer.jsonl").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"waves": 0}, "waves must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"warm_up": 0}, "warm_up must be at least 1, got 0"),
        ({"layers": 44}, r"layers must be in 1\.\.43, got 44"),
        ({"tp": 3}, "tp must divide the 8 output groups, got 3"),
        ({"shape": Shape(0, 4)}, "input must be at least 1, got 0"),
        ({"budget_s": float("nan")}, "budget_s must be at least 1, got nan"),
    ],
)
def test_a_wrong_plan_is_named_before_anything_starts(plan, changed, says):
    with pytest.raises(ValueError, match=says):
        replace(plan, **changed)


def test_the_waves_of_a_concurrency_share_what_time_is_left(plan):
    with Server(launch.Config(preset="native", port=plan.port, run=plan.out / "run")) as server:
        begun = time.monotonic()
        many = bench.Plan((1,), Shape(8, 100), waves=4, budget_s=0.8)  # a wave takes 0.5 s and more
        (found,) = bench.measure(server.url, many, say=lambda text: None)
    assert not found.valid and time.monotonic() - begun < 2.5
    assert [wave[0].error for wave in found.waves[1:]] == ["TimeoutError:"] * 3


def test_on_two_gpus_a_stage_is_named_recorded_and_traced_apart(plan, another_h200, monkeypatch):
    monkeypatch.setattr(hardware, "link", lambda: "NV18")
    walk(plan, "indexer")
    good, said = walk(replace(plan, tp=2), "indexer")
    assert good, said
    start, *measured = lines(plan, "indexer_tp2")
    assert {(line["experiment"], line["config"]["tp"]) for line in (start, *measured)} == {("serving_tp", 2)}
    live = {(receipt["hook"], receipt["rank"]) for receipt in start["server"]["receipts"]}
    assert {("attention", 0), ("attention", 1), ("mhc", 1)} <= live
    newest = max((plan.out / "records").glob("serving_tp_*"))
    step = next(line for line in map(json.loads, newest.read_text().splitlines()) if line["case"] == "step")
    assert step["check"] == {"ok": 2, "failed": 0, "passed": True, "errors": []}
    assert step["samples_us"] == [15, 15, 16, 16]  # of two ranks
    found = step["result"]
    assert (found["step_us"], found["collectives_us"], found["attention_us"]) == (15.5, 8, 5.5)
    assert found["all_reduces"] == 1 and found["padded_attention_us"] is None and found["share"] == 8 / 15.5
    assert 0 < found["model_share"] < 1
    assert set(trace.read(plan.trace("indexer", eager=False)).events["rank"]) == {0}
    both = trace.read(replace(plan, tp=2).trace("indexer", eager=False))
    assert set(both.events["rank"]) == {0, 1} and both.meta["tp"] == 2
    (old,) = (plan.out / "records").glob("serving_h200_*")
    assert "indexer_tp2" not in old.read_text() and '"serving_tp"' not in old.read_text()


def test_a_rank_without_a_trace_is_waited_for(plan, another_h200, monkeypatch):
    monkeypatch.setattr(profile, "_OUTPUT", 20)
    config = launch.Config(preset="native", tp=2, port=plan.port, run=plan.out / "run")
    with Server(config) as server, pytest.raises(profile.NoTrace, match="awaited"):
        profile.steady(server.url, plan.out / "traces", batch=2, input=8, ranks=3)


def test_attention_twice_is_profiled_and_not_measured(plan):
    good, said = walk(plan, "attention_twice")
    assert good and [line["case"] for line in lines(plan, "attention_twice")] == ["start"], said
    assert plan.trace("attention_twice", eager=False).is_file()


def test_processes_that_walk_at_once_share_the_stages(plan):
    held = []
    run = campaign._Stage.run

    def other(self):
        if not held:
            held.append(walk(plan, "native", "native_auto"))
        run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign._Stage, "run", other)
        good, said = walk(plan, "native")
    assert good and not any("done before" in text for text in said)
    (theirs, told), *_ = held
    assert theirs and any("native: another process is at it" in text for text in told)
    assert [line["method"]["beside"] for line in lines(plan, "native_auto")] == [["native"]] * 3
    assert [line["method"]["beside"] for line in lines(plan, "native")] == [[]] * 3
    newest = max((plan.out / "records").iterdir())
    assert {json.loads(line)["impl"] for line in newest.read_text().splitlines()} == {"native", "native_auto"}


@pytest.mark.parametrize(("seen", "port"), [(None, 30000), ("3,1", 30003), ("GPU-8f2a", 30000), ("", 30000)])
def test_servers_on_different_gpus_have_ports_of_their_own(tmp_path, monkeypatch, seen, port):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert Plan(out=tmp_path).port == port


def test_every_stage_is_a_preset_and_in_its_order(plan):
    assert set(LEGS) == set(presets.STAGES)
    assert stages.choose([]) == list(LEGS)
    assert stages.choose(["stock", "indexer"]) == ["indexer", "stock"]
    with pytest.raises(ValueError, match=r"stages must be of indexer, .*, got 'stok'"):
        stages.choose(["stok"])
    assert plan.config("stock_ctx8192").context_length == 8192
    assert plan.config("stock").context_length == 1_048_576


def test_the_command_line_shows_what_it_would_start(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as caught:
        cli.main(["campaign", "--dry-run", "--stages", "native,bf16", "--layers", "4", "--out", str(tmp_path / "c")])
    assert caught.value.code == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("native: env ") and second.startswith("bf16: env ")
    assert "DSV4LAB=attention=split_k,indexer=torch_bf16,mhc=bf16,sm120_path=forced" in second
    assert '{"num_hidden_layers": 4}' in second and "--context-length 1048576" in second
    assert not (tmp_path / "c").exists()
    with pytest.raises(SystemExit) as caught:
        cli.main(["campaign", "--stages", "nativ"])
    assert caught.value.code == 2 and "got 'nativ'" in capsys.readouterr().err


def test_a_wave_that_takes_too_long_has_failed(plan):
    config = launch.Config(preset="native", port=plan.port, run=plan.out / "run")
    with Server(config) as server:
        import asyncio

        outcomes = asyncio.run(load.wave(server.url, Shape(8, 1000), 2, 0, timeout_s=0.2))
    assert all("TimeoutError" in outcome.error for outcome in outcomes)


def test_processes_that_walk_together_keep_step(plan, monkeypatch):
    """Another process is at a stage, and goes on when this one waits for it."""
    other, seen = plan.lock("native"), []

    def wait(lock, step, wait_s):
        seen.append(step)
        with locked(other) as held:
            assert held
            write_atomically(meeting._place(other), "0")
            waiting = threading.Thread(target=lambda: seen.append(meet(lock, step, wait_s)))
            waiting.start()
            time.sleep(0.3)
            assert waiting.is_alive() == (step > 0)
            write_atomically(meeting._place(other), str(step))
            waiting.join(5)
        return True

    meet = meeting.meet
    monkeypatch.setattr(meeting, "meet", wait)
    good, said = walk(replace(plan, together=True), "indexer")
    assert good and not any("in vain" in text for text in said)
    assert seen == [0, True, 1, True, 2, True, campaign.PROFILED, True, meeting.END, True]
    assert all(line["method"]["together"] is True for line in lines(plan, "indexer"))


def test_nobody_is_waited_for_who_left_came_later_or_takes_too_long(tmp_path):
    own, gone, there = (tmp_path / f"{name}.lock" for name in ("own", "gone", "there"))
    gone.touch()
    with locked(own):
        assert meeting.meet(own, 1, wait_s=5)
        with locked(there):
            assert not meeting.meet(own, 2, wait_s=0.2)
            late = threading.Timer(0.2, write_atomically, [meeting._place(there), "2"])
            late.start()
            assert meeting.meet(own, 2, wait_s=5)
        assert meeting.meet(own, meeting.END, wait_s=5) and meeting._step(own) == math.inf
