"""A call like an earlier one, launched again without checking, planning and binding it again.

What a call of our kernels launches follows from how its tensors are laid out, never from what they hold. `replay` keeps
for each layout the compiled kernels with all their arguments, and then fills in the addresses alone: outside a CUDA
graph, where the host decides how long a step takes, that is a fifth of the host's time.
"""

from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from dsv4lab.kernels import launch

MOST = 4096
"""Layouts that are kept: past them all are forgotten, so that a server that meets new ones for ever does not grow."""

_kept: dict[Hashable, list[tuple] | None] = {}


def replay(call: Callable[[], object], key: tuple, tensors: Sequence[Tensor | None]) -> None:
    """`call()`, or the launches that it made when it last came with this `key` and tensors laid out like these.

    call: does nothing but `launch` kernels, on memory of `tensors` only; what it does depends on their layout and on
    `key` alone. Any other call, and all that is interpreted, is made as it is. Errors are those of `call`.
    """
    if launch.INTERPRETED:
        call()
        return
    starts = [0 if each is None else each.data_ptr() for each in tensors]
    layout = key, *map(_layout, tensors, starts), *map(starts.index, starts)
    steps = _kept.get(layout, ())
    if steps is None:
        call()
    elif steps:
        for run, arguments, places in steps:
            filled = arguments.copy()
            for at, which, offset in places:
                filled[at] = starts[which] + offset
            run(*filled)
    else:
        with launch.recorded() as made:
            call()
        if len(_kept) >= MOST:
            _kept.clear()
        _kept[layout] = _steps(made, tensors, starts)


def _layout(tensor: Tensor | None, start: int) -> tuple | None:
    """All that a launch and its compiled variant depend on."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, start % 16)


def _steps(made: list[tuple], tensors: Sequence[Tensor | None], starts: list[int]) -> list[tuple] | None:
    """(what runs, its arguments, which of them are addresses: of which tensor and how far in) of each launch.

    None if a launch cannot be repeated so: it was on other memory, or its kernel is not loaded.
    """
    steps = []
    for kernel, grid, arguments in made:
        compiled, values = launch.loaded(kernel, grid, arguments)
        places = [(at, _place(value, tensors, starts)) for at, value in enumerate(values) if isinstance(value, Tensor)]
        if compiled is None or any(place is None for _, place in places):
            return None
        for at, _ in places:
            values[at] = 0  # an address stands here: the tensor itself would be kept from being freed
        steps.append((compiled[(*grid, 1, 1)[:3]], values, [(at, *place) for at, place in places]))
    return steps


def _place(argument: Tensor, tensors: Sequence[Tensor | None], starts: list[int]) -> tuple[int, int] | None:
    """Which of `tensors` an argument lies in, and how many bytes from its start; None if that is not certain."""
    start = argument.data_ptr()
    if start in starts:
        return starts.index(start), 0
    storage = argument.untyped_storage().data_ptr()
    holders = [
        which for which, each in enumerate(tensors) if each is not None and each.untyped_storage().data_ptr() == storage
    ]
    return (holders[0], start - starts[holders[0]]) if len(holders) == 1 else None
