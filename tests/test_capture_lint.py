"""Each rule of the lint: something that triggers it, and its harmless sister that does not."""

import contextlib
import inspect

import pytest
import torch
import triton
import triton.language as tl

from dsv4lab import capture, hardware
from dsv4lab.capture.lint import RULES
from dsv4lab.capture.streams import Ledger

DEVICE = "cpu" if hardware.probe() is None else "cuda"
AWAY = "meta" if DEVICE == "cpu" else "cuda"
"""A device whose memory is not the host's: one that copies can be seen to."""


def x():
    return torch.arange(8.0, device=DEVICE)


def rules(fn, *args):
    return [finding.rule for finding in capture.check(fn, *args)]


def masked_assignment(t):
    t[t > 3] = 0
    return t


def masked_tensor_assignment(t):
    t[t > 3] = t[:4].clone()


BREAKS = [
    ("item", lambda t: t * t[0].item()),
    ("item", lambda t: float(t.max())),
    ("item", lambda t: t + 1 if t[0] > 1 else t),
    ("item", lambda t: torch.equal(t, t)),
    ("item", lambda t: t.tolist()),
    ("nonzero", lambda t: t.nonzero()),
    ("nonzero", lambda t: torch.where(t > 3)),
    ("unique", lambda t: t.unique()),
    ("unique", lambda t: torch.unique_consecutive(t)),
    ("data_dependent_size", lambda t: t[t > 3]),
    ("data_dependent_size", lambda t: t.masked_select(t > 3)),
    ("data_dependent_size", lambda t: t.int().bincount()),
    ("data_dependent_size", masked_tensor_assignment),
    ("repeat_interleave", lambda t: t.repeat_interleave(t.int())),
    ("repeat_interleave", lambda t: t.repeat_interleave(torch.ones_like(t, dtype=torch.int64), output_size=8)),
]
HARMLESS = [
    lambda t: t * t[:1],
    lambda t: torch.nonzero_static(t, size=8),
    lambda t: torch.where(t > 3, t, 0),
    masked_assignment,
    lambda t: t[torch.arange(4, device=t.device)],
    lambda t: t.repeat_interleave(2),
    lambda t: torch.empty(t.shape[0], device=t.device).copy_(t),
    lambda t: t.sort().values.topk(2),
    lambda t: t[2:4],
]


@pytest.mark.parametrize(("rule", "fn"), BREAKS)
def test_c9_what_the_host_would_have_to_know_is_named_with_its_line(rule, fn):
    (finding,) = capture.check(fn, x())
    assert finding.rule == rule
    assert finding.file == __file__
    lines, start = inspect.getsourcelines(fn)
    assert start <= finding.line < start + len(lines)
    assert f":{finding.line}: {rule}: {finding.code!r}" in str(finding)


@pytest.mark.parametrize("fn", HARMLESS)
def test_what_stays_on_the_device_is_let_be(fn):
    assert rules(fn, x()) == []


def test_what_is_on_the_host_does_not_concern_a_graph_on_the_device():
    host = torch.arange(8.0)
    assert rules(lambda t: t + host[0].item() + host.unique().numel(), torch.empty(8, device=AWAY)) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda t: t.copy_(torch.ones(8)),
        lambda t: t + torch.ones(8).to(t.device),
        lambda t: t + torch.ones(8).to(t.device, non_blocking=True),
        lambda t: t + torch.tensor([1.0], device=t.device),
        lambda t: t + t.new_tensor([1.0]),
        lambda t: t[torch.tensor([1, 2])],
    ],
)
def test_c9_copies_from_pageable_memory(fn):
    assert rules(fn, torch.empty(8, device=AWAY)) == ["pageable_copy"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda t: t + torch.ones(8, device=t.device),
        lambda t: t + torch.tensor(1.0),
        lambda t: t.double(),
        lambda t: torch.ones(8).double(),
    ],
)
def test_no_copy_no_finding(fn):
    assert rules(fn, torch.empty(8, device=AWAY)) == []


def test_copies_to_the_host():
    def read(t):
        with contextlib.suppress(NotImplementedError):  # there is nothing to copy on "meta"
            t.cpu()

    assert rules(read, torch.empty(8, device=AWAY)) == ["host_read"]


def test_pinned_memory_may_be_copied_asynchronously(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    pinned, device = torch.ones(8), torch.empty(8, device=AWAY)
    assert rules(lambda t: t.copy_(pinned, non_blocking=True), device) == []
    assert rules(lambda t: t.copy_(pinned), device) == ["pageable_copy"]


def test_findings_come_in_order_and_once_a_line():
    def step(t):
        for _ in range(3):
            t = t * t.max().item()
        return t.unique()

    assert rules(step, x()) == ["item", "unique"]


def test_an_error_carries_what_was_found_before_it():
    def step(t):
        t.unique()
        raise KeyError("lost")

    with pytest.raises(KeyError) as raised:
        capture.check(step, x())
    assert ": unique: 't.unique()'" in raised.value.__notes__[0]


def test_c1_a_cold_compile_is_found_and_a_warm_one_is_not():
    def backend(module, examples):
        compilations.append(examples[0].shape)
        return module.forward

    compilations = []
    compiled = torch.compile(lambda t: t.sin() + 1, backend=backend, dynamic=False)
    (finding,) = capture.check(lambda t: compiled(t), x())
    assert finding.rule == "cold_compile"
    assert "float32[8]" in finding.detail
    assert compilations == []
    compiled(x())
    assert rules(compiled, x()) == []
    assert rules(compiled, x()[:5]) == ["cold_compile"]
    compiled(x()[:5])
    assert compilations == [(8,), (5,)]  # checked or not, it compiles as ever


def test_c9_compiled_code_is_looked_into():
    compiled = torch.compile(lambda t: t * t.max().item(), backend="eager", dynamic=False)
    compiled(x())
    assert rules(compiled, x()) == ["item"]


@triton.jit
def store(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), 1.0)


def local_kernel():
    @triton.jit
    def mine(out, BLOCK: tl.constexpr):
        tl.store(out + tl.arange(0, BLOCK), 2.0)

    return mine


def test_a_kernel_object_that_dies_with_the_call_is_found_and_one_that_stays_is_not():
    store[(1,)](x(), BLOCK=8)
    kept = local_kernel()
    kept[(1,)](x(), BLOCK=8)
    assert rules(lambda t: (store[(1,)](t, BLOCK=8), kept[(1,)](t, BLOCK=8)), x()) == []
    found = capture.check(lambda t: local_kernel()[(1,)](t, BLOCK=8), x())
    assert [each.rule for each in found if each.rule != "cold_compile"] == ["freed_kernel"]
    assert "local_kernel()" in found[-1].code and found[-1].detail == "mine"


def test_the_ledger_follows_forks_and_joins():
    ledger = Ledger("main")
    fork, join = object(), object()
    assert ledger.work("main", 1) and not ledger.work("side", 2)
    ledger.record(fork, "main")
    assert ledger.wait(fork, "side", 3) and ledger.work("side", 4)
    assert ledger.unjoined() == [4]
    ledger.record(join, "side")
    assert ledger.wait(join, "main", 5) and ledger.unjoined() == []
    assert ledger.work("side", 6) and ledger.unjoined() == [6]


def test_the_ledger_joins_through_a_third_stream():
    ledger = Ledger("main")
    for event, source, target in ((object(), "main", "a"), (object(), "a", "b"), (object(), "b", "main")):
        ledger.work(source, source)
        ledger.record(event, source)
        assert ledger.wait(event, target, target)
    assert ledger.unjoined() == []


def test_c3_the_ledger_knows_events_of_the_capture_alone():
    ledger, before = Ledger("main"), object()
    ledger.record(before, "elsewhere")
    assert not ledger.wait(before, "main", 1)
    assert ledger.wait(before, "elsewhere", 2)
    ledger.record(before, "main")
    assert ledger.wait(before, "side", 3)


class Event:
    """CUDA's without a driver, and so is the stream below: what waits for what is told by the calls alone."""

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass


class Stream:
    def __init__(self, number):
        self.cuda_stream = number

    def wait_event(self, event):
        event.wait(self)

    def synchronize(self):
        pass


class Fake:
    """torch.cuda with these in place."""

    stream, event = Stream, Event

    def __init__(self, monkeypatch):
        self.current = Stream(1)
        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "synchronize": lambda: None,
            "is_initialized": lambda: True,
            "current_stream": lambda: self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def fake(monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("real streams are tested below")
    return Fake(monkeypatch)


def fork(fake, t, side, *, joined):
    begin, end = fake.event(), fake.event()
    begin.record(fake.current)
    side.wait_event(begin)
    with fake.on(side):
        t.add(1)
        end.record(side)
    if joined:
        fake.current.wait_event(end)
    return t.mul(2)


def test_streams_that_are_joined_or_not(fake):
    side = fake.stream(2)
    assert rules(lambda t: fork(fake, t, side, joined=True), x()) == []
    (finding,) = capture.check(lambda t: fork(fake, t, side, joined=False), x())
    assert (finding.rule, finding.code) == ("unjoined_stream", "t.add(1)")


def test_work_on_a_stream_that_does_not_follow(fake):
    def step(t):
        with fake.on(side):
            return t.add(1)

    side = fake.stream(2)
    assert rules(step, x()) == ["outside_stream"]


def test_c3_waits_on_an_event_from_before(fake):
    before, own = fake.event(), fake.event()
    before.record(fake.current)

    def own_event(t):
        own.record(fake.current)
        fake.current.wait_event(own)

    assert rules(lambda t: fake.current.wait_event(before), x()) == ["outside_event"]
    assert rules(own_event, x()) == []


def test_waits_of_the_host(fake):
    assert rules(lambda t: torch.cuda.synchronize(), x()) == ["synchronize"]
    assert rules(lambda t: fake.event().synchronize(), x()) == ["synchronize"]
    assert rules(lambda t: fake.current.synchronize(), x()) == ["synchronize"]


def test_nothing_stays_patched_behind():
    before = torch.cuda.Event.record, torch.cuda.synchronize, triton.runtime.jit.JITFunction.run
    capture.check(lambda t: t + 1, x())
    assert (torch.cuda.Event.record, torch.cuda.synchronize, triton.runtime.jit.JITFunction.run) == before


def test_every_rule_is_tested_here():
    text = inspect.getsource(inspect.getmodule(test_every_rule_is_tested_here))
    assert [rule for rule in RULES if f'"{rule}"' not in text] == []


@pytest.mark.gpu
def test_real_streams_and_events():
    def step(t, joined):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            t.add(1)
        if joined:
            torch.cuda.current_stream().wait_stream(side)

    side, before = torch.cuda.Stream(), torch.cuda.Event()
    before.record(side)
    assert rules(step, x(), True) == []
    assert rules(step, x(), False) == ["unjoined_stream"]
    assert rules(lambda t: torch.cuda.current_stream().wait_event(before), x()) == ["outside_event"]
    assert rules(lambda t: torch.cuda.synchronize(), x()) == ["synchronize"]


@pytest.mark.gpu
def test_pinned_copies_on_the_gpu():
    pinned, pageable = torch.ones(8).pin_memory(), torch.ones(8)
    assert rules(lambda t: t.copy_(pinned, non_blocking=True), x()) == []
    assert rules(lambda t: t.copy_(pageable, non_blocking=True), x()) == ["pageable_copy"]


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "fn"), BREAKS)
def test_what_is_named_does_break_a_capture(rule, fn):
    del rule
    t = x()
    with contextlib.suppress(RuntimeError):
        fn(t)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    if "output_size" in inspect.getsource(fn):
        return  # is captured, and keeps its size
    with pytest.raises(RuntimeError), torch.cuda.graph(graph, stream=stream):
        fn(t)
    from dsv4lab import timing

    with torch.cuda.stream(stream):
        timing.recover(stream)
