"""Whether a kernel is right on its inputs, before anything is timed: what a record's `check` says."""

from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsv4lab import numerics

Outputs = tuple[Tensor, ...]


class CheckFailed(RuntimeError):
    """A variant gave a wrong answer or none and was not timed; what passed is stored."""


class NotApplicable(Exception):
    """A variant does not take this case; the message says why."""


def verdict(
    module: ModuleType,
    prepare: Callable[[Any], Callable[[], Outputs]],
    inputs: Any,
    reference: Outputs,
    baseline: Outputs,
    *,
    lse_includes_sink: bool = False,
) -> dict[str, Any]:
    """The verdict on the second of two calls, the outputs of the first being poisoned.

    The module's own `judge(inputs, outputs, reference, baseline)` gives it; without one the outputs are attention's,
    (out, lse), and lse may have the sink in it.

    Raises:
        NotApplicable: `prepare` refused the case with a ValueError. CheckFailed: an output is wrong or was not written.
    """
    try:
        launch = prepare(inputs)
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    for unwritten in launch():
        numerics.poison_(unwritten)
    del unwritten  # what allocates its outputs gets the poisoned memory again
    outputs = launch()
    if hasattr(module, "judge"):
        return _passed("out", module.judge(inputs, outputs, reference, baseline))
    references = [(out, _with_sink(lse, inputs) if lse_includes_sink else lse) for out, lse in (reference, baseline)]
    return _attention(*outputs, *references)


def _attention(out: Tensor, lse: Tensor, reference: Outputs, baseline: Outputs) -> dict[str, Any]:
    """The verdict on `out`, with that on `lse` beside it."""
    found = _passed("out", numerics.check(out, reference[0], baseline[0]))
    some = reference[1].isfinite()  # a row without keys: infinite, with the sign of each kernel's own convention
    of_lse = _passed("lse", numerics.check(lse[some], reference[1][some], baseline[1][some]))
    if not lse[~some].isinf().all():
        raise CheckFailed("lse of a row without keys is not infinite")
    return found | {"lse_error": of_lse["error"], "lse_tolerance": of_lse["tolerance"]}


def _passed(name: str, check: numerics.Check) -> dict[str, Any]:
    if not check.passed:
        raise CheckFailed(f"{name} has error {check.error:.2e}, over its tolerance {check.tolerance:.2e}")
    return asdict(check)


def _with_sink(lse: Tensor, inputs: Any) -> Tensor:
    """lse `[B, H, s_q]` with the sink taken in; a row without keys has the sink alone."""
    sink = inputs.attn_sink.to(lse.dtype)[:, None]
    return torch.where(lse.isinf(), sink, torch.logaddexp(lse, sink))
