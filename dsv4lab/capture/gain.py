"""What the recipe gains: the decode step's cluster replayed uncompiled, compiled, and what is opaque in it alone."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from dsv4lab import numerics, timing
from dsv4lab.capture.step import Step, inputs
from dsv4lab.journal import Journal
from dsv4lab.kernels import sparse_mla
from dsv4lab.provenance import command_line, environment, git_state, kernel_hash
from dsv4lab.records import Clocks, Record
from dsv4lab.roofline import Work
from dsv4lab.verdict import CheckFailed

EXPERIMENT = "capture_gain"
BATCHES = (1, 16, 64)
ATTENTION = "split_k"


def run(
    batches: Sequence[int] = BATCHES,
    *,
    directory: Path | str | None = None,
    budget_s: float = 1.0,
    mode: str = "default",
) -> Path:
    """Times the step at each batch size and returns the new record file; impl is "eager", "compiled" or "attention".

    All are captured and replayed in turn, with warm caches. budget_s: replay seconds for one batch size. mode: of
    torch.compile. RuntimeError without a CUDA GPU; CheckFailed if a result is wrong.
    """
    device = timing.require_gpu()
    shared = dict(seed=1, argv=command_line(), git=git_state(), env=environment(device))
    shared["kernel_sha256"] = kernel_hash(sparse_mla)
    with Journal(EXPERIMENT, shared["env"].gpu, directory) as journal:
        for batch in batches:
            torch.compiler.reset()  # each batch size has code of its own, as a bucket of a server has
            journal.add(_measure(batch, device, budget_s, mode, shared))
        return journal.finish()


def _measure(batch: int, device: torch.device, budget_s: float, mode: str, shared: dict) -> list[Record]:
    step, args = Step(ATTENTION, (batch,), device), inputs(batch, device, seed=shared["seed"])
    opaque = torch.randn(batch, *step.q_shape, device=device).bfloat16(), args[1][:, : step.q_shape[1]], args[2]
    calls = {"eager": lambda: step(*args), "attention": lambda: (step.attend(*opaque),)}
    compiled = torch.compile(step.__call__, mode=mode)
    calls["compiled"] = lambda: compiled(*args)
    checks = {impl: _check(call, step, args, opaque) for impl, call in calls.items()}
    before = timing.clocks(device)
    timed = timing.graph_replay_us(
        {impl: [call] * timing.WARM_CALLS for impl, call in calls.items()}, budget_s=budget_s, device=device
    )
    if timed.errors:
        raise CheckFailed("; ".join(f"B = {batch}, {impl}: {error}" for impl, error in timed.errors.items()))
    clocks = Clocks(before=before, after=timing.clocks(device))
    return [
        Record(
            experiment=EXPERIMENT,
            case=f"b{batch}",
            impl=impl,
            config={"B": batch, "mode": mode if impl == "compiled" else None, "cache": "warm"},
            method={"timer": "cuda graph replay", "calls": timing.WARM_CALLS},
            samples_us=samples,
            check=checks[impl],
            work=_work(batch, impl),
            date_utc=datetime.now(UTC),
            clocks=clocks,
            **shared,
        )
        for impl, samples in timed.samples_us.items()
    ]


def _check(call: Callable[[], Sequence[Tensor]], step: Step, args: Sequence[Tensor], opaque: Sequence[Tensor]) -> dict:
    """Against the same step with norm and RoPE in float64, beside the uncompiled one; attention is taken as it is."""
    out = call()[0]
    reference, baseline = step(*args, wide=torch.float64)[0], step(*args)[0]
    if out.shape != reference.shape:  # attention alone
        reference = baseline = step.attend(*opaque)
    found = numerics.check(out, reference, baseline)
    if not found.passed:
        raise CheckFailed(f"the step has error {found.error:.2e}, over its tolerance {found.tolerance:.2e}")
    return asdict(found)


def _work(batch: int, impl: str) -> Work:
    """Of the attention; for the glue, hidden and residual once in and once out. Its operations do not count."""
    attention = sparse_mla.work(sparse_mla.Case("step", batch, Step.q_shape[0]))
    glue = 0 if impl == "attention" else 4 * 2 * batch * Step.hidden_size
    return Work(attention.flops, attention.bytes + glue)
