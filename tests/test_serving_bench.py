import asyncio
import json
import os
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from aiohttp import web

from dsv4lab import cli, records
from dsv4lab.records import Environment, Git
from dsv4lab.serving import bench, guard, http, launch, receipts, server_record, settings, sglang_load
from dsv4lab.serving.bench import Identity, Measured, Plan, WrongServer
from dsv4lab.serving.load import Outcome, Shape, body, check_length, take, take_chunk

INFO = {"version": "0.5.14", "context_length": 1048576, "cuda_graph_bs": [1, 2, 4], "speculative_algorithm": None}
INFO |= {"internal_states": [{"memory_usage": {"graph": 0.35}, "api_key": "sesame"}]}
INFO |= {
    "model_path": "/somewhere/models/dsv4",
    "api_key": "sesame",
    "json_model_override_args": '{"num_hidden_layers": 6}',
}
KEY = "sesame-4711"


def chunk(tokens: int, **about) -> dict:
    return {"output_ids": [1] * tokens, "meta_info": {"completion_tokens": tokens, "finish_reason": None} | about}


def event(data: dict | str) -> bytes:
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


GOOD = [chunk(1), chunk(3), chunk(4, finish_reason={"type": "length"}), "[DONE]"]
ERROR = {"error": {"message": "engine died", "code": 500}}


class FakeServer:
    """Answers /generate with the scripts it is given, one a request, the last for ever."""

    def __init__(self):
        self.scripts: list = [GOOD]
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.info: object = INFO

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, int):
            return web.Response(status=script, text="overloaded")
        if not self.asked[-1]["stream"]:
            return web.json_response(script[-2])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for data in script:
            if data == "hang up":
                request.transport.abort()
                break
            await answer.write(event(data))
            await asyncio.sleep(0.002)
        return answer

    async def describe(self, request: web.Request) -> web.Response:
        return web.Response(text=self.info if isinstance(self.info, str) else json.dumps(self.info))

    async def start(self, ready: threading.Event, end: asyncio.Event) -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate), web.get("/server_info", self.describe)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()
        await end.wait()
        await runner.cleanup()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake, ready, loop, end = FakeServer(), threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(fake.start(ready, end)))
    thread.start()
    assert ready.wait(10)
    yield fake
    loop.call_soon_threadsafe(end.set)
    thread.join(10)
    loop.close()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    environment = Environment(
        gpu="NVIDIA H200", gpu_count=1, capability=(9, 0), driver="1", cuda="13", python="3.12", torch="2", triton="3"
    )
    monkeypatch.setattr(
        server_record, "provenance", lambda: (environment, Git(commit=None, dirty=None), ["dsv4lab", "bench"])
    )
    monkeypatch.setattr(bench, "clocks_now", lambda: None)
    monkeypatch.setattr(launch, "state_file", lambda port: tmp_path / "state.json")
    monkeypatch.delenv(guard.API_KEY, raising=False)


SMALL = Plan(concurrency=(4,), shape=Shape(input=8, output=4), waves=2)


def measured(server: FakeServer, scripts: list, plan: Plan = SMALL) -> Measured:
    """`scripts` for the measured requests; the warm-up is good."""
    server.scripts = [GOOD] * plan.concurrency[0] + scripts
    (found,) = bench.measure(server.url, plan, say=lambda text: None)
    return found


# one stream


def read(*data: dict | str, expected: int = 4) -> Outcome:
    async def lines() -> AsyncIterator[bytes]:
        for each in data:
            for line in event(each).splitlines(keepends=True):
                yield line

    outcome = Outcome(0.0)
    asyncio.run(take(outcome, lines(), expected))
    return outcome


def test_a_good_stream_has_its_tokens_counted_by_usage():
    outcome = read(*GOOD)
    assert (outcome.tokens, outcome.error, len(outcome.arrivals)) == (4, "", 3)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([chunk(1), chunk(3), ERROR, "[DONE]"], "engine died"),
        ([chunk(4), ERROR, "[DONE]"], "engine died"),
        (["[DONE]"], "no token came"),
        ([chunk(0), "[DONE]"], "no token came"),
        ([chunk(1), chunk(2), "[DONE]"], "2 of 4 tokens came"),
        ([chunk(1), chunk(4)], "the stream broke off"),
        ([chunk(4, finish_reason={"type": "abort", "message": "out of\nmemory"}), "[DONE]"], "aborted: out of memory"),
        (["[1, 2]", "[DONE]"], "[1, 2]"),
    ],
)
def test_a_stream_that_went_wrong_has_failed_and_nothing_of_it_counts(data, says):
    outcome = read(*data)
    assert says in outcome.error
    assert outcome.tokens == 0


def test_speculation_brings_several_tokens_a_chunk():
    outcome = Outcome(0.0, 0.13, [(0.100, 1), (0.110, 4), (0.120, 7), (0.130, 8)], steps=4)
    assert outcome.tokens == 8
    assert outcome.tpot == pytest.approx(4.29e-3, rel=1e-3)
    assert 1 / outcome.tpot == pytest.approx(233, rel=2e-3)
    assert outcome.chunk_gaps == pytest.approx([0.01] * 3)
    assert outcome.ttft == 0.1
    result = Measured(1, [[outcome]]).result()
    assert result["tpot_ms"] == pytest.approx(30 / 7) and result["chunk_gap_ms"] == pytest.approx(10)
    assert result["accept_length"] == 2 and result["steps_s"] == pytest.approx(4 / 0.03)


def test_tokens_that_came_at_once_have_no_times():
    outcome = Outcome(0.0, 1.0, [(1.0, 8)])
    assert outcome.ttft is None and outcome.tpot is None
    assert Outcome(0.0, 1.0, [(1.0, 1)]).ttft == 1.0


def test_a_late_error_does_not_hide_the_first():
    outcome = Outcome(0.0)
    take_chunk(outcome, {"error": "first"})
    take_chunk(outcome, {"error": "second"})
    check_length(outcome, 4)
    assert "first" in outcome.error


def test_prompts_are_as_long_as_asked_and_differ():
    import random

    first, second = (body(Shape(8, 4), rng) for rng in [random.Random(1)] * 2)
    assert len(first["input_ids"]) == 8 and first["input_ids"] != second["input_ids"]
    assert first["sampling_params"] == {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    assert body(Shape(8, 4), random.Random(1)) == body(Shape(8, 4), random.Random(1))


# waves


def test_a_run_counts_good_requests(server):
    found = measured(server, [GOOD])
    assert (found.ok, len(found.outcomes), found.valid) == (8, 8, True)
    result = found.result()
    assert result["output_tok_s"] > 0 and result["ttft_ms"] > 0 and result["tpot_ms"] > 0
    assert result["accept_length"] is None and result["compiles"] is None
    assert found.headline().startswith("C=4: 8/8 ok, ")
    assert len(server.asked) == 12  # a warm-up of the same shape comes first
    prompts = [tuple(asked["input_ids"]) for asked in server.asked]
    assert len(set(prompts)) == 12 and {len(prompt) for prompt in prompts} == {8}


def test_refused_requests_are_in_the_headline_and_make_the_run_invalid(server):
    plan = replace(SMALL, concurrency=(10,), waves=1)
    found = measured(server, [GOOD, 503] * 4 + [GOOD], plan)
    assert (found.ok, found.valid) == (6, False)
    assert found.headline().startswith("C=10: INVALID: 6/10 ok, ")
    assert "first error: HTTP 503: overloaded" in found.headline()
    assert sum(outcome.tokens for outcome in found.outcomes) == 24


def test_a_server_that_dies_under_load_makes_no_better_numbers(server):
    found = measured(server, [[chunk(1), chunk(3), "hang up"], GOOD, ["[DONE]"], [chunk(2), ERROR, "[DONE]"], GOOD])
    assert found.ok == 5 and not found.valid
    assert sum(outcome.tokens for outcome in found.outcomes) == 20


def test_one_failure_in_a_hundred_is_borne():
    good, bad = Outcome(0.0, 1.0, [(0.5, 1), (1.0, 4)]), Outcome(0.0, 1.0, error="x")
    assert Measured(1, [[good] * 99 + [bad]]).valid
    assert not Measured(1, [[good] * 98 + [bad] * 2]).valid


def test_the_first_error_is_the_earliest():
    late, early = Outcome(0.0, 2.0, error="a late one"), Outcome(0.0, 1.0, error="the first one")
    assert Measured(2, [[late, early]]).headline().endswith("(first error: the first one)")


def test_prompts_from_the_cache_are_told(server):
    found = measured(server, [[chunk(1, cached_tokens=6), chunk(4, cached_tokens=6), "[DONE]"]])
    assert found.result()["cached_tokens"] == 6 * 8
    assert "48 prompt tokens came from the server's cache" in found.headline()
    assert "cache" not in measured(server, [GOOD]).headline()


def test_every_request_of_a_batch_takes_part_in_the_same_steps():
    each = Outcome(0.0, 1.5, [(0.5, 1), (1.5, 21)], steps=10)
    assert Measured(4, [[each] * 4]).result()["steps_s"] == 10
    assert Measured(1, [[Outcome(0.0, 1.0, [(1.0, 8)], steps=4)]]).result()["steps_s"] is None


@pytest.mark.parametrize("odd", [{"meta_info": [1]}, {"meta_info": {"completion_tokens": None}}, "no JSON"])
def test_an_answer_of_another_form_is_a_failed_request(server, odd):
    found = measured(server, [GOOD, [chunk(1), odd, "[DONE]"]])
    assert 0 < found.ok < 8 and all(outcome.end for outcome in found.outcomes)


def test_a_long_answer_may_repeat_all_its_tokens(server):
    long = chunk(1) | {"output_ids": [120_000] * 80_000}
    found = measured(server, [[long, chunk(4), "[DONE]"]])
    assert found.ok == 8, found.headline()


def test_what_was_measured_before_the_end_is_kept(server, tmp_path, monkeypatch):
    original = bench.load.wave

    async def interrupted(url, shape, concurrency, *rest, **options):
        if concurrency == 2:
            raise KeyboardInterrupt
        return await original(url, shape, concurrency, *rest, **options)

    monkeypatch.setattr(bench.load, "wave", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        bench.run(server.url, replace(SMALL, concurrency=(1, 2)), directory=tmp_path, say=lambda text: None)
    (kept,) = tmp_path.glob("*.partial")
    assert json.loads(kept.read_text())["config"]["C"] == 1
    assert kept.name in caught.value.__notes__[0]


def test_no_success_is_a_result_all_the_same(server):
    found = measured(server, [500])
    result = found.result()
    assert result["output_tok_s"] == 0 and result["ttft_ms"] is None
    assert found.headline().startswith("C=4: INVALID: 0/8 ok, 0.0 tok/s")


def test_answers_may_be_taken_whole(server):
    found = measured(server, [GOOD], replace(SMALL, shape=Shape(8, 4, stream=False)))
    assert found.ok == 8 and found.result()["ttft_ms"] is None and found.result()["output_tok_s"] > 0
    assert not measured(server, [[chunk(2), "[DONE]"]], replace(SMALL, shape=Shape(8, 4, stream=False))).ok


def test_the_key_goes_with_every_request(server, monkeypatch):
    monkeypatch.setenv(guard.API_KEY, KEY)
    measured(server, [GOOD])
    assert set(server.keys) == {f"Bearer {KEY}"}


def test_a_proxy_in_the_environment_is_passed_by(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert bench.identify(server.url).info["version"] == "0.5.14"
    assert measured(server, [GOOD]).ok == 8


def test_throughput_counts_all_the_time_and_the_steady_one_where_all_decode():
    early = Outcome(0.0, 3.0, [(1.0, 1), (2.0, 11), (3.0, 21)])
    late = Outcome(0.0, 4.0, [(2.0, 1), (3.0, 11), (4.0, 21)])
    failed = Outcome(0.0, 5.0, [(0.1, 1), (4.9, 400)], error="died")
    assert bench.throughput([early, late]) == 42 / 4
    assert bench.throughput([early, late, failed]) == 42 / 5
    assert bench.steady([early, late, failed]) == 20 / 1
    assert bench.steady([failed]) is None
    assert bench.steady([Outcome(0.0, 1.0, [(0.5, 1), (1.0, 2)]), Outcome(0.0, 3.0, [(2.0, 1), (3.0, 2)])]) is None


def test_compilations_in_the_log_of_the_run_are_told(server, tmp_path):
    log = tmp_path / "log"
    log.write_text("ninja: before\n")
    server.scripts = [GOOD]
    original = bench.load.wave

    async def compiling(*args, **options):
        with log.open("a") as file:
            file.write("Compiling kernel f\nstep\n")
        return await original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.load, "wave", compiling)
        (found,) = bench.measure(server.url, SMALL, log, say=lambda text: None)
    assert found.compiles == 2  # two waves; that of the warm-up does not count
    assert "2 compilations meanwhile" in found.headline()


# SGLang's own benchmark


class Output(types.SimpleNamespace):
    @classmethod
    def init_new(cls, given):
        return cls(prompt_len=given.prompt_len, itl=[])


@pytest.fixture
def sglang(monkeypatch) -> types.ModuleType:
    """A benchmark with the names of SGLang's that runs one request after the other."""
    module = types.ModuleType("sglang.benchmark.serving")
    for name in ("sglang", "sglang.benchmark"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.ASYNC_REQUEST_FUNCS, module.RequestFuncOutput, module.outputs = {}, Output, []
    module.DatasetRow = lambda *row: types.SimpleNamespace(prompt=row[0], prompt_len=row[1], output_len=row[2])
    module.set_global_args = lambda given: vars(module).update(args=given)

    async def benchmark(backend, input_requests, **more):
        print("much")
        assert more["max_concurrency"] == len(input_requests) == module.args.num_prompts
        for row in input_requests:
            module.outputs.append(await module.ASYNC_REQUEST_FUNCS[backend](request_func_input=row, pbar=None))
        good = sum(output.success for output in module.outputs[-len(input_requests) :])
        return {"output_throughput": 10.0 * good, "median_ttft_ms": 5.0, "median_tpot_ms": float("nan")}

    module.benchmark = benchmark
    return module


def test_sglangs_benchmark_drives_and_its_account_is_recorded_beside_ours(server, sglang, tmp_path, capsys):
    server.scripts = [GOOD] * 4 + [[chunk(1), ERROR, "[DONE]"]] + [GOOD]
    plan = replace(SMALL, driver="sglang", waves=3)
    _, valid = bench.run(server.url, plan, stage="x", directory=tmp_path, say=lambda text: None)
    (record,) = records.read("serving", tmp_path)
    assert not valid and "much" not in capsys.readouterr().out
    assert (record.check["ok"], record.check["failed"], record.method["driver"]) == (11, 1, "sglang")
    assert record.result["sglang_output_tok_s"] == 40 and record.result["sglang_ttft_ms"] == 5
    assert record.result["sglang_tpot_ms"] is None and record.result["output_tok_s"] > 0
    failed, good = sglang.outputs[4], sglang.outputs[-1]
    assert not failed.success and "engine died" in failed.error and failed.output_len == 0
    assert good.success and good.output_len == 4 and len(good.itl) == 3 and 0 < good.ttft < good.latency
    assert [len(asked["input_ids"]) for asked in server.asked] == [8] * 16


def test_what_breaks_in_sglangs_benchmark_costs_only_what_it_had_not_begun(server, sglang):
    run = sglang.benchmark

    async def breaks(input_requests, **more):
        more["max_concurrency"] = sglang.args.num_prompts = 3
        await run(input_requests=input_requests[:3], **more)
        raise KeyError("mean_ttft_ms")

    sglang.benchmark = breaks
    found = measured(server, [GOOD], replace(SMALL, driver="sglang"))
    assert found.ok == 6 and not found.valid and "sglang_ttft_ms" not in found.result()
    assert "SGLang's benchmark: KeyError: 'mean_ttft_ms'" in found.headline()


def test_without_sglang_its_benchmark_is_named_missing(server, monkeypatch):
    monkeypatch.setattr(sglang_load, "_PLACES", ("sglong.benchmark",))
    with pytest.raises(ValueError, match=r"there is no sglong; --driver own needs none"):
        measured(server, [GOOD], replace(SMALL, driver="sglang"))
    with pytest.raises(ValueError, match="driver must be one of own, sglang, got 'vllm'"):
        replace(SMALL, driver="vllm")


# the right server


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        ({"context_length": "8192"}, "context_length was to be 8192, and the server has 1048576"),
        ({"version": "0.5.13.post1"}, "version was to be 0.5.13.post1, and the server has 0.5.14"),
        ({"cuda_graph_bs": "[1]"}, r"cuda_graph_bs was to be \[1\], and the server has \[1, 2, 4\]"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm was to be EAGLE, and the server has null"),
        ({"nonsense": "1"}, "nonsense was to be 1, and the server has null"),
        ({"hooks": "topk=triton"}, "hooks was to be topk=triton, and the server has none"),
    ],
)
def test_another_server_is_not_timed(server, tmp_path, expect, says):
    with pytest.raises(WrongServer, match=says):
        bench.run(server.url, replace(SMALL, expect=expect), directory=tmp_path)
    assert server.asked == []


def test_the_server_that_was_meant_is(server):
    expect = {"context_length": "1048576", "version": "0.5.14", "speculative_algorithm": "null", "hooks": ""}
    bench.check_identity(bench.identify(server.url), expect)


@pytest.mark.parametrize("info", ["junk", "[]", {"version_": 1}, INFO | {"internal_states": ["junk"]}])
def test_a_server_of_another_kind_is_not_timed(server, tmp_path, info):
    server.info = info
    with pytest.raises(http.NoAnswer, match="/server_info was not answered"):
        bench.run(server.url, SMALL, directory=tmp_path)
    assert server.asked == []


def test_what_the_launcher_left_tells_stage_hooks_and_log(server, tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "receipts").mkdir(parents=True)
    monkeypatch.setenv(receipts.VARIABLE, str(run / "receipts"))
    receipts.write(receipts.Receipt(kind="live", hook="topk", impl="triton", rank=0, pid=1, sglang="0.5.14"))
    (run / launch.STARTED).write_text(json.dumps({"preset": "indexer"}))
    me = guard.Process(os.getpid())
    left = {"boot": guard.boot_id(), "guard": {"pid": me.pid, "started": me.started}, "log": str(run / "server.log")}
    (tmp_path / "state.json").write_text(json.dumps(left))
    found = bench.identify(server.url)
    assert (found.stage, found.hooks, found.log) == ("indexer", "topk=triton", run / "server.log")
    bench.check_identity(found, {"hooks": "topk=triton,version=0.5.14"})
    assert settings.parse(found.hooks).active == {"topk": "triton"}


# records


def test_a_run_is_recorded_without_paths_and_keys(server, tmp_path, monkeypatch):
    server.scripts = [GOOD]
    path, valid = bench.run(server.url, SMALL, stage="indexer", directory=tmp_path, say=lambda text: None)
    assert valid
    (record,) = records.read("serving", tmp_path)
    assert (record.case, record.impl) == ("c4_in8_out4", "indexer")
    assert record.config == {"stage": "indexer", "C": 4, "context_length": 1048576, "layers": 6, "tp": 1}
    assert record.check == {"ok": 8, "failed": 0, "passed": True, "errors": []}
    assert len(record.samples_us) == 2
    assert record.server["info"]["model_path"] == "dsv4"
    assert record.server["info"]["memory_gb"] == [{"graph": 0.35}]
    assert "sesame" not in path.read_text()
    row = records.to_frame([record]).iloc[0]
    assert row["output_tok_s"] == record.result["output_tok_s"] and row["passed"]


@pytest.mark.parametrize("text", [r'{"message": "Traceback:\n died"}', r'{"at": "a:\n"}', r"C:\Users\x", "~/a /b //c"])
def test_no_error_text_keeps_a_failure_from_being_recorded(text):
    failed = Measured(1, [[Outcome(0.0, 1.0, error=text)]])
    line = bench.record(failed, SMALL, Identity(INFO), "stock")
    assert len(line.check["errors"]) == 1


def test_a_failed_run_is_recorded_as_failed(tmp_path):
    outcome = Outcome(0.0, 1.0, error="ClientError: /tmp/some/socket is gone")
    line = bench.record(Measured(1, [[outcome]]), SMALL, Identity(INFO), "stock")
    assert line.check["passed"] is False and line.check["errors"] == ["ClientError: socket is gone"]
    assert line.result["output_tok_s"] == 0
    records.write([line], "serving", tmp_path)
    assert not records.to_frame(records.read("serving", tmp_path))["passed"].any()


# the command line


def status(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    return caught.value.code


def test_bench_prints_a_line_a_concurrency_and_records(server, tmp_path, capsys):
    arguments = ("--concurrency", "1,2", "--input", "8", "--output", "4", "--waves", "1", "--out", str(tmp_path))
    assert status("bench", server.url, *arguments, "--expect", "version=0.5.14") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["C=1", "C=2", "recorded"]
    server.scripts = [503]
    assert status("bench", server.url, *arguments, "--out", str(tmp_path / "second")) == 1
    assert len(records.read("serving", tmp_path / "second")) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--expect", "context_length=8192"], 2, "context_length was to be 8192, and the server has 1048576"),
        (["--expect", "context_length"], 2, "--expect context_length must read NAME=VALUE"),
        (["--expect", "hooks=topk"], 2, "DSV4LAB: 'topk' must read name=value"),
        (["--concurrency", "1,x"], 2, "--concurrency must read like 1,16,64, got '1,x'"),
        (["--concurrency", "0"], 2, "concurrency must be at least 1, got 0"),
        (["--waves", "0"], 2, "waves must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_one_line(server, capsys, arguments, code, says):
    assert status("bench", server.url, *arguments) == code
    assert server.asked == []
    err = capsys.readouterr().err
    assert err.startswith("dsv4lab: ") and err.count("\n") == 1 and says in err


def test_no_server_is_one_line_and_status_1(capsys):
    assert status("bench", "http://127.0.0.1:1") == 1
    assert "http://127.0.0.1:1: /server_info was not answered" in capsys.readouterr().err
