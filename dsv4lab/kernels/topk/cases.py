"""Named shapes of the indexer's top-k, their inputs, the reference selection, the verdict, the work."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dsv4lab import numerics
from dsv4lab.kernels.rows import own_lengths
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "topk"
PAGE = 64
MAX_1M = DSV4_FLASH.c4_positions(1_048_576)
LENGTHS = ("full", "mixed")
SCORES = ("normal", "relu")


@dataclass(frozen=True)
class Case:
    """B rows of scores, max_len wide, of which `actual` are a row's own ("mixed": 0 to `actual`).

    scores: "normal" numbers, or "relu": most of them exactly 0, and so tied.
    """

    name: str
    B: int
    max_len: int
    actual: int
    k: int = DSV4_FLASH.index_topk
    lengths: str = "full"
    scores: str = "normal"

    def __post_init__(self):
        for name, known in (("lengths", LENGTHS), ("scores", SCORES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")


@dataclass
class Inputs:
    """Arguments of one `topk_transform` call, by its argument names; the outputs are allocated by `prepare`."""

    scores: Tensor
    seq_lens: Tensor
    page_tables: Tensor
    page_size: int
    k: int


def _cases() -> dict[str, Case]:
    shapes = ((1, MAX_1M, 128), (32, MAX_1M, 128), (32, 2048, 128), (32, MAX_1M, 2048), (32, MAX_1M, 16384))
    shapes += ((8, MAX_1M, 262_144), (64, 2048, 2048), (1, MAX_1M, 262_144))
    cases = [Case(f"b{B}_max{max_len}_len{actual}", B, max_len, actual) for B, max_len, actual in shapes]
    shapes = [(DSV4_FLASH.c4_positions(1024 * kilo), 128) for kilo in (8, 32, 128, 512)] + [(MAX_1M, 65_536)]
    cases += [Case(f"b32_max{max_len}_len{actual}", 32, max_len, actual) for max_len, actual in shapes]
    cases += [
        Case("b64_mixed", 64, MAX_1M, 262_144, lengths="mixed"),
        Case("b8_ties", 8, MAX_1M, 262_144, scores="relu"),
        Case("b32_k1024", 32, MAX_1M, 16384, k=1024),
        Case("b7_k37_odd", 7, 1001, 1001, k=37, lengths="mixed"),
    ]
    return {case.name: case for case in cases}


CASES = _cases()


def config(case: Case) -> dict:
    """What a record says of the case."""
    return {k: v for k, v in asdict(case).items() if k != "name"} | {"next_n": 1}


def _scores(case: Case) -> float:
    return case.B * case.actual * (1.0 if case.lengths == "full" else 0.5)


def rotated_bytes(case: Case) -> float:
    """Bytes that one set of inputs reads and no other set does; "mixed" counts its expected share."""
    return 4.0 * _scores(case) if case.actual > case.k else 4.0 * case.B * case.k


def work(case: Case) -> Work:
    """One call: every score once, unless a row has no more than k, and the indices. A comparison is no flop."""
    return Work(flops=0.0, bytes=rotated_bytes(case) + 4.0 * case.B * case.k)


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` calls; past a row's own scores lie NaNs. The same seed gives the same inputs on the same device kind."""
    generator, host = torch.Generator(device).manual_seed(seed), torch.Generator().manual_seed(seed)
    calls, pages = [], -(-case.max_len // PAGE)
    for _ in range(sets):
        lengths = torch.full((case.B,), case.actual, dtype=torch.int32)
        if case.lengths == "mixed":
            lengths = torch.randint(0, case.actual + 1, (case.B,), generator=host, dtype=torch.int32)
            lengths[0], lengths[-1] = case.actual, 0
        scores = torch.randn(case.B, case.max_len, device=device, generator=generator)
        if case.scores == "relu":
            scores = torch.relu(scores - 3.5)
        lengths = lengths.to(device)
        scores.masked_fill_(torch.arange(case.max_len, device=device) >= lengths[:, None], float("nan"))
        table = torch.argsort(torch.rand(case.B, pages, device=device, generator=generator), 1).int()
        calls.append(Inputs(scores, lengths, table, PAGE, case.k))
    return calls


def _lengths(inputs: Inputs) -> Tensor:
    """Scores that count, int32 [rows]."""
    rows, batch = len(inputs.scores), len(inputs.page_tables)
    room = min(inputs.scores.shape[1], inputs.page_tables.shape[1] * inputs.page_size)
    return own_lengths(inputs.seq_lens, batch, rows // batch).flatten().clamp(0, room)


def selection(inputs: Inputs) -> Tensor:
    """Positions [rows, k], int64, ascending, then -1: the k largest scores of each row, of equal ones the first."""
    picked = torch.full((len(inputs.scores), inputs.k), -1, dtype=torch.int64, device=inputs.scores.device)
    for row, n in enumerate(_lengths(inputs).tolist()):
        scores = inputs.scores[row, :n].double().clamp(min=-1e300)  # what is -inf stays above NaN
        scores = torch.where(scores.isnan(), float("-inf"), scores)
        best = torch.sort(scores, descending=True, stable=True).indices[: inputs.k]
        picked[row, : len(best)] = best.sort().values
    return picked


def paged(inputs: Inputs, positions: Tensor) -> Tensor:
    """Positions [rows, k] -> slots page_table[b, position // page] * page + position % page, int32; -1 stays."""
    page, next_n = inputs.page_size, len(positions) // len(inputs.page_tables)
    found = inputs.page_tables.long().repeat_interleave(next_n, 0).gather(1, positions.clamp(min=0) // page)
    return torch.where(positions < 0, -1, found * page + positions.clamp(min=0) % page).int()


def unpaged(inputs: Inputs, slots: Tensor) -> Tensor:
    """Slots [rows, k] -> positions, int64; -1 stays. The inverse of `paged` where no page is there twice."""
    page, next_n = inputs.page_size, len(slots) // len(inputs.page_tables)
    known = inputs.page_tables.argsort(1).repeat_interleave(next_n, 0)
    place = known.gather(1, (slots.long() // page).clamp(0, known.shape[1] - 1))
    return torch.where(slots < 0, -1, place * page + slots % page)


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(slots [rows, k] in ascending order of position, int32, padded with -1),."""
    return (paged(inputs, selection(inputs)),)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """A selection is right or wrong: the reference is its own baseline."""
    return reference(inputs)


def judge(inputs: Inputs, outputs: tuple[Tensor, ...], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    """The verdict on (indices [rows, k],) as sets; error is the share of the selection missed in the worst row.

    int32: slots, which must be the reference's if they are in order of position, as ours are. Else, and for positions
    as `torch.topk` gives them (int64), ties may be broken in another way: scores must be those of the reference's.
    """
    (found,) = outputs
    if found.dtype == torch.int64:
        missed = _missed_by_score(inputs, found)
    else:
        missed = 1.0 - numerics.selection_overlap(found, expected[0]).min().item()
        if ((found >= 0).sum(1) != (expected[0] >= 0).sum(1)).any():
            missed = float("inf")
        positions = unpaged(inputs, found)
        if missed and not ((positions.diff() > 0) | (positions[:, 1:] < 0)).all():
            missed = min(missed, _missed_by_score(inputs, positions))
    return numerics.Check(missed, 0.0, 0.0, missed == 0)


def _missed_by_score(inputs: Inputs, found: Tensor) -> float:
    """The share of scores that are not the reference's, in the worst row; infinite where a position is there twice."""
    found, unseen = found.sort().values, _lengths(inputs)[:, None]
    best, right = (
        inputs.scores.gather(1, each.clamp(min=0)).masked_fill((each < 0) | (each >= unseen), float("-inf"))
        for each in (found, selection(inputs)[:, : found.shape[1]])
    )
    wrong = (best.sort().values != right.sort().values).double().mean(1).max().item()
    return wrong if ((found.diff() > 0) | (found[:, 1:] < 0)).all() else float("inf")
