"""All-reduces between real processes over gloo, and how the launcher takes what can go wrong with them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dsv4lab import comm, hardware, records
from dsv4lab.allreduce import setups, sweep, worker
from dsv4lab.verdict import CheckFailed

GLOO = setups.CPU_SETUPS[0]
NCCL_LOG = """node:7:7 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node:7:7 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node:7:7 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
node:7:7 [0] NCCL INFO AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}"""


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_processes_are_measured_and_recorded(tmp_path, ranks):
    path = sweep.run(ranks, cases=["4KiB", "64KiB"], directory=tmp_path)
    run = records.read("allreduce", tmp_path)
    assert (path.name, [record.case for record in run]) == (run[0].file, [f"n{ranks}_4KiB", f"n{ranks}_64KiB"])
    assert list(tmp_path.iterdir()) == [path]
    for record, nbytes in zip(run, (4096, 65536), strict=True):
        assert (record.impl, record.env.gpu, record.config["ranks"]) == ("gloo", None, ranks)
        assert record.method["calls"] == 1  # 16 in a row by 8 ranks on 2 cores would outlast the group's time
        assert record.work.bytes == comm.wire_bytes(nbytes, ranks) and record.config["message_bytes"] == nbytes
        assert 0 < record.check["error"] <= record.check["tolerance"]


def test_a_rank_that_fails_ends_its_group_and_says_why(tmp_path, monkeypatch):
    """Rank 1 alone knows a second implementation, which is none; rank 0 would wait for it at the end."""
    monkeypatch.setattr(sweep, "asdict", lambda job: vars(replace(job, impls=job.impls[: job.rank + 1])))
    group = sweep._Sweep(2, False, (4096,), 0, tmp_path)._group(replace(GLOO, impls=("all_reduce", "none")))
    assert "rank 1: KeyError: 'none'" in group.error and [len(lines) for lines in group.lines] == [1, 1]


def test_what_every_rank_got_to_is_recorded_and_failures_are_named(tmp_path, monkeypatch):
    good = {"impl": "all_reduce", "bytes": 4096, "mode": "eager", "calls": 16, "samples_us": [1.0, 5.0]}
    good["check"] = {"error": 0.0, "baseline_error": 0.0, "tolerance": 1e-4, "passed": True}
    wrong = good | {"bytes": 8192, "check": good["check"] | {"error": 1.0, "passed": False}}
    lines = [[good, wrong, good], [good | {"samples_us": [2.0, 3.0]}, wrong]]
    monkeypatch.setattr(sweep._Sweep, "_group", lambda *_, **__: sweep.Group(lines, "not done within 45 s"))
    with pytest.raises(CheckFailed, match=r"gloo eager at 8KiB: error 1.00e\+00.*; gloo: not done within 45 s \(the "):
        sweep.run(2, directory=tmp_path)
    (record,) = records.read("allreduce", tmp_path)
    assert record.samples_us == [2.0, 5.0]  # the slowest rank's


def test_setups_without_time_are_named_and_nothing_is_left(tmp_path):
    with pytest.raises(CheckFailed, match="nothing could be measured: gloo: no time left"):
        sweep.run(2, directory=tmp_path, total_s=-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (dict(ranks=1), "ranks must be at least 2 .* got 1"),
        (dict(ranks=0), "ranks must be at least 2 .* got 0"),
        (dict(cases=["3KiB"]), "cases has no '3KiB'; known: 4KiB, .*64MiB"),
        (dict(impls=["nccl_ring"]), "impls has no 'nccl_ring'; known: gloo"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        sweep.run(**arguments, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_multicast_stays_off_whatever_the_user_says(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/alice/topo.xml")
    for setup in setups.GPU_SETUPS:
        assert setups.variables(setup).items() >= hardware.NO_MULTICAST.items()
        steering = sweep._steering(setup)
        assert "NCCL_NVLS_ENABLE=0" in steering and "NCCL_TOPO_FILE=topo.xml" in steering
    assert not any("multimem" in impl for impl in worker.IMPLEMENTATIONS)


def test_setups_have_names_of_their_own_and_known_implementations():
    names = [setup.impl_name(impl) for setup in setups.GPU_SETUPS for impl in setup.impls]
    assert len(set(names)) == len(names)
    assert {impl for setup in setups.GPU_SETUPS for impl in setup.impls} == set(worker.IMPLEMENTATIONS)
    assert [setups.label(size) for size in (setups.SIZES[0], setups.SIZES[-1])] == ["4KiB", "64MiB"]
    assert set(setups.QUICK_SIZES) <= set(setups.SIZES)


def test_the_log_of_nccl_tells_what_it_chose(tmp_path, monkeypatch):
    def probe(self, setup, timed):
        Path(setup.environment["NCCL_DEBUG_FILE"].replace("%p", "7")).write_text(NCCL_LOG)
        return sweep.Group([], None)

    monkeypatch.setattr(sweep._Sweep, "_group", probe)
    monkeypatch.setattr(hardware, "link", lambda: "NV18")
    log = sweep._Sweep(2, False, (4096,), 0, tmp_path)._probe()
    assert log == {4096: "RING LL", 67108864: "RING SIMPLE", "transport": "P2P/CUMEM", "link": "NV18"}


def test_processes_are_gone_when_one_fails_when_time_is_over_and_when_the_block_fails(tmp_path):
    sleep, fail = ([sys.executable, "-c", code] for code in ("import time; time.sleep(60)", "raise ValueError('no')"))
    outputs = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for commands, limit_s, error in (([sleep, fail], 30, ""), ([sleep, sleep], 0.2, "not done within 0.2 s")):
        with sweep._started(commands, outputs, os.environ) as processes:
            assert sweep._wait(processes, limit_s) == error
        assert all(process.returncode is not None for process in processes)
    assert sweep._last_words(outputs[::-1], processes) == "a rank was killed"
    with pytest.raises(KeyboardInterrupt), sweep._started([sleep], outputs[:1], os.environ) as processes:
        raise KeyboardInterrupt
    assert processes[0].returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_rank_dies_with_its_launcher():
    child = "import os, time; from dsv4lab.allreduce import worker; worker._die_with(os.getppid()); print(os.getpid())"
    child += "; import sys; sys.stdout.flush(); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def alone():
    """A rank without others, in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = dict(rank=0, ranks=1, port=store.port, launcher=0, backend="gloo", seed=0, budget_s=0.01)
    yield worker.Rank(worker.Job(**job, impls=("all_reduce",), modes=("eager",), sizes=(4096,)))
    dist.destroy_process_group()


def test_a_wrong_sum_is_said_and_not_timed(alone, capsys, monkeypatch):
    right = worker._all_reduce

    def wrong(source: torch.Tensor) -> worker.Call:
        call = right(source)
        return replace(call, launch=lambda: call.launch().mul_(1.01))

    for implementation, passed in ((right, True), (wrong, False)):
        monkeypatch.setitem(worker.IMPLEMENTATIONS, "all_reduce", implementation)
        alone.run()
        line = json.loads(capsys.readouterr().out)
        assert (line["check"]["passed"], "samples_us" in line) == (passed, passed)


def test_as_many_calls_as_a_sample_has_stay_within_bf16():
    assert 8.0 ** (2 * worker.calls_per_sample(4096)) * 10 < torch.finfo(torch.bfloat16).max
