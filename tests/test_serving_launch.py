import importlib.metadata
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4lab import tuned
from dsv4lab.serving import arguments, bench, guard, launch, machine, presets, server_log, settings, synthetic
from dsv4lab.serving.launch import Config, ServeError, Server
from dsv4lab.serving.machine import Gpu

FAKE = Path(__file__).with_name("fake_sglang.py")
H200 = Gpu("NVIDIA H200", "sm_90", 141 * 2**30, 140 * 2**30)
KEY = "sesame-4711"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def one_h200(monkeypatch, tmp_path):
    """An H200, a parser that takes every flag, and a server that is a fake."""
    monkeypatch.setattr(Server, "command", (sys.executable, str(FAKE)))
    monkeypatch.setattr(arguments, "check", lambda flags: 1)
    monkeypatch.setattr(machine, "gpus", lambda: [H200])
    monkeypatch.setattr(launch, "_POLL_S", 0.05)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(guard.API_KEY, raising=False)


def fake(port: int, tmp_path: Path, **options) -> Config:
    options = {"preset": "synthetic", "run": tmp_path / "run", "timeout_s": 20.0} | options
    return Config(port=port, **options)


def alive(pid: int) -> bool:
    return any(process.pid == pid and process.alive for process in guard.processes())


def children_said(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child:")]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


# start and stop


def test_a_server_starts_proves_its_hooks_and_ends(port, tmp_path):
    with Server(fake(port, tmp_path)) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        assert server.info["version"] == "0.5.14"
        assert {receipt.hook for receipt in server.receipts} == presets.find("synthetic").setting.active.keys()
        identity = bench.identify(server.url)
        assert (identity.stage, identity.log) == ("synthetic", server.log)
        assert settings.parse(identity.hooks) == server.config.hooks
        assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["num_hidden_layers"] == 43
    machine.check_port("127.0.0.1", port)
    assert not launch.state_file(port).exists()


def test_a_hook_that_is_not_live_on_every_rank_fails_the_start(port, tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "check", lambda flags: 2)
    monkeypatch.setattr(machine, "gpus", lambda: [H200] * 2)
    with pytest.raises(ServeError, match=r"attention=gluon is live on ranks \[0\] only, of 2 asked for; indexer="):
        Server(fake(port, tmp_path)).start()
    machine.check_port("127.0.0.1", port)
    monkeypatch.setenv("FAKE_RANKS", "2")
    with Server(fake(port, tmp_path)):
        pass


def test_receipts_of_an_earlier_start_do_not_count(port, tmp_path, monkeypatch):
    with Server(fake(port, tmp_path)):
        pass
    monkeypatch.setenv("FAKE_RANKS", "0")
    with pytest.raises(ServeError, match="attention=gluon is live on no rank"):
        Server(fake(port, tmp_path)).start()


def test_the_first_error_is_told_and_not_the_last(port, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "crash")
    with pytest.raises(ServeError, match=r"ended with status 1: torch.OutOfMemoryError: CUDA out of memory\. Tried"):
        Server(fake(port, tmp_path)).start()


@pytest.mark.parametrize(
    ("mode", "says"), [("refuses", "/generate was not answered"), ("junk", "/server_info was not")]
)
def test_a_server_that_answers_wrongly_fails_the_start(port, tmp_path, monkeypatch, mode, says):
    monkeypatch.setenv("FAKE", mode)
    with pytest.raises(ServeError, match=says):
        Server(fake(port, tmp_path)).start()
    machine.check_port("127.0.0.1", port)


def test_a_slow_start_says_what_it_waits_for(port, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "slow")
    said = []
    with Server(fake(port, tmp_path), said.append):
        pass
    assert "loading weights" in said and "capturing graph 3 of 12 (batch 32)" in said


def test_a_start_that_takes_too_long_says_where_it_stood(port, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "hangs")
    with pytest.raises(ServeError, match="not ready after 1 s, last seen loading weights"):
        Server(fake(port, tmp_path, timeout_s=1.0)).start()


def test_a_server_that_dies_later_is_told(port, tmp_path):
    with Server(fake(port, tmp_path)) as server:
        os.kill(json.loads(launch.state_file(port).read_text())["group"]["pid"], signal.SIGKILL)
        with pytest.raises(ServeError, match="the server ended with status 1"):
            server.wait()


def test_a_program_that_is_not_there_is_named(port, tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "command", ("no-such-program",))
    with pytest.raises(ServeError, match="no-such-program cannot be started: No such file"):
        Server(fake(port, tmp_path)).start()


# what is known before


def test_a_busy_port_is_refused_and_its_owner_left_alone(port, tmp_path):
    owner = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], stderr=-3)
    try:
        assert until(lambda: not free(port))
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be had: Address already in use"):
            Server(fake(port, tmp_path)).start()
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.wait()


def free(port: int) -> bool:
    try:
        machine.check_port("127.0.0.1", port)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"preset": "rtx"}, "preset must be one of rtx6000-8x"),
        ({"preset": "single"}, "model must be given: preset single has no synthetic one"),
        ({"preset": "single", "model": "x/y", "layers": 4}, "layers belongs to a synthetic model"),
        ({"flags": ("--api-key", "x")}, "--api-key would show on the command line: set DSV4LAB_API_KEY instead"),
        ({"flags": ("--admin-api-key=x",)}, "--admin-api-key would show on the command line"),
        ({"nnodes": 2}, "dist_init_addr must be given for 2 nodes"),
        ({"nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, r"node_rank must be in 0\.\.1, got 2"),
        ({"nnodes": 0}, "nnodes must be at least 1, got 0"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"context_length": -1}, "context_length must be at least 1, got -1"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"port": 99999}, "port must be at most 65535, got 99999"),
        ({"port": 0}, "port must be at least 1, got 0"),
        ({"timeout_s": 0}, "timeout_s must be at least 1, got 0"),
    ],
)
def test_a_wrong_config_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        Config(**{"preset": "synthetic"} | options)


@pytest.mark.parametrize(
    ("options", "here", "says"),
    [
        ({"model": "/no/such/model"}, [H200], "model /no/such/model does not exist"),
        ({"model": "."}, [H200], "model . has no config.json"),
        ({}, [], "serve needs an NVIDIA GPU, and nvidia-smi sees none"),
        ({"preset": "rtx6000-8x", "model": "a/b"}, [H200], "rtx6000-8x is for sm_120, and here is NVIDIA H200, sm_90"),
        ({"layers": 30}, [H200], "the weights take 183 GiB a GPU, and of the 141 GiB of NVIDIA H200 140 are free"),
        ({"layers": 44}, [H200], r"layers must be in 1\.\.43, got 44"),
    ],
)
def test_what_cannot_work_here_is_refused_before_anything_starts(port, tmp_path, monkeypatch, options, here, says):
    monkeypatch.setattr(machine, "gpus", lambda: here)
    monkeypatch.setattr(Server, "_spawn", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(ValueError, match=says):
        Server(fake(port, tmp_path, **options)).start()


def test_two_ranks_need_two_gpus():
    with pytest.raises(ValueError, match="2 ranks need as many GPUs, and here are 1"):
        machine.check_gpus(presets.find("single"), "single", 2, 0, [H200])


def test_gpus_are_read_from_the_driver(monkeypatch):
    monkeypatch.undo()
    listed = "NVIDIA H200, 9.0, 143771, 143000\nNVIDIA RTX PRO 6000 Blackwell, 12.0, 97887, 97000\n"
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, listed)

    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    first, second = machine.gpus()
    assert (first.arch, second.arch, second.free) == ("sm_90", "sm_120", 97000 * 2**20)
    assert "--id=2,3" in asked[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    listed = "NVIDIA GB10, 12.1, [N/A], [N/A]\n"
    (only,) = machine.gpus()
    machine.check_gpus(presets.find("single"), "single", 1, 2**40, [only])


# the command line and the environment of the server


@pytest.mark.parametrize("name", presets.PRESETS | presets.STAGES)
def test_every_preset_makes_a_command_line(name, tmp_path):
    preset = presets.find(name)
    config = Config(model="a/b", preset=name, flags=("--mem-fraction-static", "0.5"))
    argv = config.argv("a/b")
    assert preset.about.endswith(".")
    assert argv[:8] == ["--model-path", "a/b", "--host", "127.0.0.1", "--port", "30000", "--tp-size", str(preset.gpus)]
    assert argv[-2:] == ["--mem-fraction-static", "0.5"]
    assert settings.parse(config.environment(tmp_path)["DSV4LAB"]) == preset.setting


def test_what_is_given_counts_over_the_preset():
    setting = settings.parse("topk=triton")
    config = Config(preset="synthetic", tp=2, context_length=8192, layers=4, setting=setting)
    argv = config.argv("m")
    assert argv[argv.index("--tp-size") + 1] == "2" and argv[argv.index("--context-length") + 1] == "8192"
    assert json.loads(argv[argv.index("--json-model-override-args") + 1]) == {"num_hidden_layers": 4}
    assert config.hooks is setting
    assert Config(preset="synthetic", setting=settings.Setting()).hooks.active == {}


def test_our_presets_take_the_tables_that_were_tuned_for_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    ours, stage = Config(model="a/b", preset="rtx6000-8x"), Config(preset="indexer")
    assert ours.with_tables("NVIDIA H200") is ours
    tuned.write_sglang(tuned.gemm_path(tmp_path, "NVIDIA H200", 1536, 4096), {1: {}})
    assert ours.with_tables("NVIDIA H200").hooks == replace(ours.hooks, tables="tuned")
    assert ours.with_tables("NVIDIA H100") is ours
    assert stage.with_tables("NVIDIA H200") is stage  # what is compared is what its name says
    given = Config(model="a/b", preset="rtx6000-8x", setting=settings.parse("topk=triton"))
    assert given.with_tables("NVIDIA H200") is given


def test_several_nodes_are_sglangs_own():
    argv = Config(model="a/b", nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000").argv("a/b")
    for flag, value in (("--nnodes", "2"), ("--node-rank", "1"), ("--dist-init-addr", "10.0.0.1:5000")):
        assert argv[argv.index(flag) + 1] == value


def test_the_plugin_is_let_in_beside_those_that_were(port, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with Server(fake(port, tmp_path)) as server:
        assert "plugins: other,dsv4lab" in server.log.read_text()


def test_a_checkout_that_is_not_installed_has_a_plugin_all_the_same(port, tmp_path, monkeypatch):
    monkeypatch.setattr(launch.metadata, "entry_points", lambda **_: ())
    with Server(fake(port, tmp_path)) as server:
        (path,) = [part for part in server.log.read_text().split(":") if part.endswith("/run/metadata")]
    monkeypatch.undo()
    (found,) = importlib.metadata.Distribution.discover(name="dsv4lab", path=[path])
    (entry,) = found.entry_points
    assert (entry.group, entry.name, entry.value) == (
        "sglang.srt.plugins",
        "dsv4lab",
        "dsv4lab.serving.plugin:register",
    )


def test_the_key_is_in_no_command_line_log_or_info(port, tmp_path, monkeypatch):
    monkeypatch.setenv(guard.API_KEY, KEY)
    with Server(fake(port, tmp_path)) as server:
        secret = Path(server.argv[server.argv.index("--config") + 1])
        assert json.loads(secret.read_text()) == {"api-key": KEY}
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert "key: ***" in server.log.read_text()
        assert KEY not in server.log.read_text() + json.dumps(server.info) + " ".join(server.argv)
        assert server.info["internal_states"][0].keys() == {"last_gen_throughput", "memory_usage"}
        running = [Path(f"/proc/{process.pid}/cmdline") for process in guard.descendants(os.getpid())]
        assert running and not any(KEY.encode() in path.read_bytes() for path in running)
    assert not secret.exists()


def test_a_key_split_over_two_reads_is_blacked_out(tmp_path, monkeypatch):
    monkeypatch.setenv(guard.API_KEY, KEY)
    log = tmp_path / "log"
    source, sink = os.pipe()
    pump = guard.threading.Thread(target=guard.copy, args=(os.fdopen(source, "rb"), log))
    pump.start()
    for part in (b"one " + KEY[:4].encode(), KEY[4:].encode() + b"\rtwo\nthr", b"ee"):
        os.write(sink, part)
        time.sleep(0.05)
    os.close(sink)
    pump.join(5)
    assert log.read_bytes() == b"one ***\rtwo\nthree"


# nothing is left behind


def test_stopping_ends_a_family_that_will_not_hear(port, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "family")
    server = Server(fake(port, tmp_path)).start()
    family = [*children_said(server.log), json.loads(launch.state_file(port).read_text())["group"]["pid"]]
    assert len(family) == 3 and all(map(alive, family))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 10
    assert not any(map(alive, family))
    assert alive(bystander.pid)
    bystander.kill()
    bystander.wait()


LAUNCHER = """
import sys, tempfile, time
from pathlib import Path
from dsv4lab.serving import arguments, launch, machine
tempfile.tempdir = sys.argv[3]
machine.gpus = lambda: [machine.Gpu("NVIDIA H200", "sm_90", 2**40, 2**40)]
arguments.check = lambda flags: 1
launch.Server.command = (sys.executable, sys.argv[1])
launch.Server(launch.Config(preset="synthetic", port=int(sys.argv[2]), run=Path(sys.argv[3]) / "run")).start()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def launcher(port, tmp_path, monkeypatch):
    """A process that started a server with a family and can be killed."""
    monkeypatch.setenv("FAKE", "family")
    command = [sys.executable, "-c", LAUNCHER, str(FAKE), str(port), str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(FAKE.parents[1])}
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    until(lambda: not launch.state_file(port).exists())


def test_nothing_outlives_a_launcher_that_was_killed(launcher, port, tmp_path):
    (tmp_path / "run" / guard.SECRET).write_text("key")
    family = children_said(tmp_path / "run" / "server.log")
    launcher.kill()
    launcher.wait()
    assert until(lambda: not any(map(alive, family)) and free(port))
    assert until(lambda: not launch.state_file(port).exists(), 2)
    assert until(lambda: not (tmp_path / "run" / guard.SECRET).exists(), 2)


def test_a_second_start_finds_the_first(launcher, port, tmp_path):
    with pytest.raises(ValueError, match=r"a server that dsv4lab started still runs there: kill \d+ ends it"):
        Server(fake(port, tmp_path)).start()


def test_a_start_waits_for_a_server_that_is_being_ended(launcher, port, tmp_path, monkeypatch):
    launcher.kill()
    launcher.wait()
    monkeypatch.delenv("FAKE")
    said = []
    with Server(fake(port, tmp_path, run=tmp_path / "second"), said.append):
        assert not any(map(alive, children_said(tmp_path / "run" / "server.log")))
    assert "an earlier server is being ended" in said


def test_a_start_ends_what_a_killed_guard_left_behind(launcher, port, tmp_path, monkeypatch):
    state = json.loads(launch.state_file(port).read_text())
    family = children_said(tmp_path / "run" / "server.log")
    os.kill(state["guard"]["pid"], signal.SIGKILL)
    assert until(lambda: not alive(state["guard"]["pid"])) and all(map(alive, family))
    monkeypatch.delenv("FAKE")
    said = []
    with Server(fake(port, tmp_path, run=tmp_path / "second"), said.append):
        assert not any(map(alive, family))
    assert any(text.startswith("ended ") and "that an earlier server left behind" in text for text in said)


def test_stopping_ends_what_its_own_killed_guard_left_behind(port, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "family")
    server = Server(fake(port, tmp_path)).start()
    family = children_said(server.log)
    server._guard.kill()
    with pytest.raises(ServeError, match="the server ended with status -9"):
        server.wait()
    assert all(map(alive, family))
    server.stop()
    assert not any(map(alive, family)) and not launch.state_file(port).exists()


def test_a_server_that_came_after_a_killed_guard_is_not_the_one_it_started(launcher, port, tmp_path):
    assert bench.identify(f"http://127.0.0.1:{port}").stage == "synthetic"
    os.kill(json.loads(launch.state_file(port).read_text())["guard"]["pid"], signal.SIGKILL)
    assert until(lambda: free(port)) and launch.state_file(port).exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.http, "server_info", lambda url: {"version": "0.5.14", "internal_states": []})
        found = bench.identify(f"http://127.0.0.1:{port}")
    assert (found.stage, found.hooks, found.log) == ("", "", None)


def test_what_does_not_end_stays_known(tmp_path, monkeypatch):
    stuck = guard.Process(os.getpid())
    one = guard.Guard.__new__(guard.Guard)
    one.launcher, one.code, one.state, one.log = os.getppid(), 0, tmp_path / "state", tmp_path / "log"
    one.pump, one.asked_to_end = guard.threading.Thread(target=int), guard.threading.Event()
    one.pump.start()
    monkeypatch.setattr(guard.Guard, "_end", lambda _: None)
    for left, stays in (([stuck], True), ([], False)):
        monkeypatch.setattr(guard, "descendants", lambda _, left=left: left)
        one.state.write_text("{}")
        one.run()
        assert one.state.exists() is stays


def test_a_process_of_somebody_else_does_not_keep_the_others_alive(monkeypatch):
    sent = []

    def kill(pid, number):
        sent.append(pid)
        raise PermissionError

    monkeypatch.setattr(guard.os, "kill", kill)
    guard.send(signal.SIGTERM, [guard.Process(os.getpid()), guard.Process(1)])
    assert sent == [os.getpid(), 1]


def test_a_full_disk_does_not_keep_the_server_waiting():
    source, sink = os.pipe()
    pump = guard.threading.Thread(target=guard.copy, args=(os.fdopen(source, "rb"), Path("/dev/full")), daemon=True)
    pump.start()
    writer = guard.threading.Thread(target=os.write, args=(sink, b"x\n" * (1 << 18)), daemon=True)
    writer.start()
    writer.join(5)
    assert not writer.is_alive()
    os.close(sink)
    pump.join(5)
    assert not pump.is_alive()


def test_a_state_file_of_another_boot_or_of_a_reused_number_ends_nothing(port):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    mine = guard.Process(bystander.pid)
    for boot, started in (("another", mine.started), (guard.boot_id(), mine.started - 1)):
        left = {
            "boot": boot,
            "mark": "none",
            "guard": {"pid": 1 << 22, "started": 0},
            "group": {"pid": mine.pid, "started": started},
        }
        launch.state_file(port).write_text(json.dumps(left))
        assert list(launch.end_leftovers(launch.state_file(port))) == []
        assert alive(bystander.pid) and not launch.state_file(port).exists()
    bystander.kill()
    bystander.wait()


# the log


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it said nothing"),
        ("[2026-01-01 00:00:00] bye\n\n", "bye"),
        (
            "x\n[2026-01-01 00:00:00 TP3] Traceback (most recent call last):\n  File\n    f()\nValueError: a\nzzz",
            "ValueError: a",
        ),
        (
            "dsv4lab: no hooks for sglang 0.6.0: known are\nRuntimeError: later",
            "dsv4lab: no hooks for sglang 0.6.0: known are",
        ),
        ("sglang: error: unrecognized arguments: --foo", "sglang: error: unrecognized arguments: --foo"),
        (
            "[2026-01-01 00:00:00 TP3] Traceback (most recent call last):\n  File\n"
            "[2026-01-01 00:00:00 TP1] Load weight end.\n    f()\nValueError: a\n",
            "ValueError: a",
        ),
    ],
)
def test_the_first_error_of_a_log(text, says):
    assert server_log.first_error(text) == says


def test_a_failed_capture_is_traced_to_its_first_error_and_to_the_flag():
    text = (
        "Traceback (most recent call last):\n  File x\n"
        "torch._inductor.exc.SubprocException: in capture\n"
        "RuntimeError: CUDA error: operation failed due to a previous error during capture\n"
    )
    said = server_log.first_error(text, ["--enable-torch-compile"])
    assert said.startswith("torch._inductor.exc.SubprocException: in capture; --enable-torch-compile is on")
    assert "enable-torch-compile" not in server_log.first_error(text, [])


def test_an_error_that_ends_in_a_colon_is_followed_to_what_it_announces():
    text = (
        "Traceback (most recent call last):\n"
        '  File "async_compile.py", line 444, in get_result\n    raise e.with_name(kernel_name) from e\n'
        "torch._inductor.exc.InductorError: SubprocException: An exception occurred in a subprocess:\n\n"
        "Name=_tiled_sparse_decode_kernel\nTraceback (most recent call last):\n"
        '  File "triton/compiler/compiler.py", line 80, in make_ir\n    return ast_to_ttir(self.fn, self, context)\n'
        "triton.compiler.errors.CompilationError: at 72:4:\n    m_i: tl.float32 = -1e30\n"
        "    for tile_start in range(0, topk, BLOCK_T):\n    ^\n"
        "AssertionError('Loop-carried variable m_i has initial type fp32 but is re-assigned to fp64 in loop!')\n\n\n"
        "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace\n\n"
        "During handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "decode_cuda_graph_runner.py", line 355, in __init__\n    raise Exception(\n'
        "Exception: Capture cuda graph failed: SubprocException: An exception occurred in a subprocess:\n"
    )
    assert server_log.first_error(text) == (
        "torch._inductor.exc.InductorError: SubprocException: An exception occurred in a subprocess: "
        "triton.compiler.errors.CompilationError: at 72:4: "
        "AssertionError('Loop-carried variable m_i has initial type fp32 but is re-assigned to fp64 in loop!')"
    )
    assert server_log.first_error("RuntimeError: shapes of:\n") == "RuntimeError: shapes of:"


CAPTURING = "Capturing batches (bs={} avail_mem=1.05 GB):  25%|##5       | {}/12 [00:01<00:03]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "starting"),
        ("Loading safetensors checkpoint shards:  25% Completed | 12/46 [00:01<?]", "loading weights, shard 12 of 46"),
        ("Load weight end.\nCapture cuda graph begin. This can take minutes.", "capturing graphs"),
        (f"Capture cuda graph begin.\n\r{CAPTURING.format(64, 0)}", "capturing graph 0 of 12 (batch 64)"),
        (f"\r{CAPTURING.format(64, 0)}\r{CAPTURING.format(48, 1)}", "capturing graph 1 of 12 (batch 48)"),
        (f"{CAPTURING.format(1, 12)}\nCapture cuda graph end.\nUvicorn running on", "answering"),
    ],
)
def test_progress_is_the_last_stage_seen(text, says):
    assert server_log.progress(text) == says


# SGLang's parser


def test_ranks_of_a_node():
    def parsed(**given):
        return arguments.argparse.Namespace(**{"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1} | given)

    assert arguments.ranks(parsed(tp_size=8)) == 8
    assert arguments.ranks(parsed(tp_size=8, nnodes=2, pp_size=2)) == 8
    assert arguments.ranks(parsed(tp_size=4, dp_size=2)) == 8
    assert arguments.ranks(parsed(tp_size=8, dp_size=8, enable_dp_attention=True)) == 8
    older = dict(tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=2, nnodes=1)
    assert arguments.ranks(arguments.argparse.Namespace(**older)) == 8
    with pytest.raises(ValueError, match="tp 1, pp 1 and dp 1 make 1 ranks, which 2 nodes cannot share"):
        arguments.ranks(parsed(nnodes=2))


def test_ranks_that_cannot_be_are_one_line(monkeypatch):
    impossible = arguments.argparse.Namespace(tp_size=3, pp_size=1, dp_size=1, nnodes=2)
    monkeypatch.setattr(arguments, "parse", lambda flags: impossible)
    with pytest.raises(SystemExit, match=r"dsv4lab: tp 3, .* which 2 nodes cannot share"):
        arguments.main()


def test_without_sglang_the_command_that_helps_is_named(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(sys, "argv", ["arguments"])
    with pytest.raises(SystemExit) as end:
        arguments.main()
    assert "sglang does not load" in end.value.code and "pip install 'dsv4lab[kernels,serve]'" in end.value.code


def test_what_the_parser_says_is_passed_on(monkeypatch):
    monkeypatch.undo()
    done = subprocess.CompletedProcess([], 2, "", "usage: x\nsglang: error: unrecognized arguments: --foo\n")
    monkeypatch.setattr(arguments.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ValueError, match=r"^sglang: error: unrecognized arguments: --foo$"):
        arguments.check(["--foo"])
    done.returncode, done.stdout = 0, 'noise\n{"ranks": 4}\n'
    assert arguments.check([]) == 4


def test_what_hangs_beforehand_is_named(monkeypatch):
    monkeypatch.undo()

    def hangs(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(ValueError, match="sglang does not read its flags within 300 s"):
        arguments.check(["--hangs"])
    with pytest.raises(ValueError, match="nvidia-smi does not answer within 60 s: the driver hangs"):
        machine.gpus()


def test_the_synthetic_model_has_every_layer_ratio(tmp_path):
    config = json.loads((synthetic.write(tmp_path / "m") / "config.json").read_text())
    assert len(config["compress_ratios"]) == config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    assert config["head_dim"] == 512 and config["qk_rope_head_dim"] == 64
