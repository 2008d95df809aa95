"""What tests of a walk over several servers share: an H200 that is none, and a plan for it."""

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from dsv4lab.records import Environment, Git
from dsv4lab.serving import arguments, bench, guard, launch, machine, server_record
from dsv4lab.serving.launch import Server
from dsv4lab.serving.load import Shape
from dsv4lab.serving.machine import Gpu
from dsv4lab.serving.stages import Plan

FAKE = Path(__file__).with_name("fake_sglang.py")
H200 = Gpu("NVIDIA H200", "sm_90", 141 * 2**30, 140 * 2**30)
ENVIRONMENT = Environment(
    gpu="NVIDIA H200", gpu_count=1, capability=(9, 0), driver="1", cuda="13", python="3.12", torch="2", triton="3"
)


@pytest.fixture
def one_h200(monkeypatch, tmp_path):
    """An H200 whose server is a fake."""
    monkeypatch.setattr(Server, "command", (sys.executable, str(FAKE)))
    monkeypatch.setattr(arguments, "check", lambda flags: int(flags[flags.index("--tp-size") + 1]))
    monkeypatch.setattr(machine, "gpus", lambda: [H200])
    monkeypatch.setattr(launch, "_POLL_S", 0.02)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server_record, "provenance", lambda: (ENVIRONMENT, Git(commit=None, dirty=None), ["dsv4lab"]))
    monkeypatch.setattr(bench, "clocks_now", lambda: None)
    monkeypatch.delenv(guard.API_KEY, raising=False)


@pytest.fixture
def another_h200(monkeypatch, one_h200):
    """A second one in the same machine."""
    monkeypatch.setattr(machine, "gpus", lambda: [H200, H200])


@pytest.fixture
def plan(tmp_path) -> Plan:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Plan(out=tmp_path / "out", shape=Shape(8, 4), waves=3, warm_up=2, port=port)
