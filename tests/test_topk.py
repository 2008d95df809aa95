"""The indexer's top-k against a stable sort: ties, lengths, pages, the levels of long rows. b* are known faults."""

from dataclasses import replace

import pytest
import torch

from dsv4lab import hardware
from dsv4lab.kernels import topk
from dsv4lab.kernels.launch import ColdKernel, frozen, is_warm

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CANARY = -77


def one(seed=0, **shape):
    defaults = dict(name="test", B=2, max_len=700, actual=600, k=37)
    return topk.make_inputs(topk.Case(**(defaults | shape)), device=DEVICE, seed=seed)[0]


def rows(*scores, k, lengths=None, page=64):
    """A call on the given rows of scores, each of any length, over shuffled pages."""
    scores = [torch.as_tensor(each, dtype=torch.float32, device=DEVICE) for each in scores]
    lengths = [len(each) for each in scores] if lengths is None else lengths
    width = max(len(each) for each in scores)
    padded = torch.stack([torch.nn.functional.pad(s, (0, width - len(s)), value=float("inf")) for s in scores])
    pages = -(-width // page)
    table = torch.randperm(len(scores) * pages, device=DEVICE).int().view(len(scores), pages)
    return topk.Inputs(padded, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table, page, k)


def select(call, **options):
    """(slots, positions) of a call on outputs full of canaries, in a workspace full of garbage but for its counts."""
    n = len(call.scores)
    out, raw = (torch.full((n, call.k + 3), CANARY, dtype=torch.int32, device=DEVICE) for _ in range(2))
    shape = topk.workspace_shape(*call.scores.shape, call.k)
    workspace = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)
    workspace[:, -topk.ARRIVALS :] = 0
    topk.topk_transform(
        call.scores, call.seq_lens, call.page_tables, out[:, : call.k], call.page_size, raw[:, : call.k],
        workspace=workspace, **options,
    )  # fmt: skip
    assert (out[:, call.k :] == CANARY).all() and (raw[:, call.k :] == CANARY).all()
    return out[:, : call.k], raw[:, : call.k]


def assert_right(call, **options):
    """Positions as a stable sort picks them, in ascending order, and their slots."""
    slots, positions = select(call, **options)
    expected = topk.selection(call)
    order = expected.masked_fill(expected < 0, 2**40).sort().values
    expected = order.masked_fill(order == 2**40, -1)
    assert torch.equal(positions.long(), expected)
    assert torch.equal(slots, topk.paged(call, expected))
    return positions


LEVELS = (38, 600, 4095, 4097, 16_385, 65_537)
"""Lengths on both sides of where another level of maxima comes in; the last ones are in the test marked gpu."""


@pytest.mark.parametrize("n", LEVELS)
@pytest.mark.parametrize("scores", ["normal", "relu"])
def test_rows_of_every_number_of_levels(n, scores):
    call = one(B=1, max_len=n, actual=n, scores=scores)
    if scores == "relu":
        call.scores = torch.relu(call.scores - 1.0)  # most are 0, and so the last ones chosen are tied
        call.scores[:, n // 2 :] = 0
    assert_right(call)
    assert_right(replace(call, scores=-call.scores))


@pytest.mark.parametrize("where", ["one run", "every group", "ends"])
def test_a_long_row_whose_best_lie_together(where):
    n, k = 16_400, 512
    call = one(B=1, max_len=n, actual=n, k=k)
    position = torch.arange(n, device=DEVICE)
    best = {
        "one run": (position > 5000) & (position <= 5000 + k),
        "every group": position % 4 == 1,
        "ends": (position < 100) | (position > n - 600),
    }[where]
    call.scores = call.scores + 10 * best
    assert_right(call)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [262_144, 262_145, 262_208, 1 << 20])
@pytest.mark.parametrize("k", [37, 512, 1024, 2048])
def test_rows_of_a_million(n, k):
    for scores in topk.cases.SCORES:
        assert_right(one(B=3, max_len=n, actual=n, k=k, lengths="mixed", scores=scores))


@pytest.mark.parametrize("k", [1, 2, 512, 1024, 1025, 2048])
def test_any_k(k):
    assert_right(one(B=1, max_len=9000, actual=9000, k=k))


@pytest.mark.parametrize(
    "distribution", ["lognormal", "steps", "two values", "denormal", "huge", "ascending", "descending"]
)
def test_any_distribution(distribution):
    n = 5000
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, generator=g)
    scores = {
        "lognormal": torch.exp(20 * x),
        "steps": torch.randint(-3, 4, (n,), generator=g).float(),
        "two values": (x > 0).float(),
        "denormal": x * 1e-42,
        "huge": torch.where(x > 1, torch.inf, x * 1e38),
        "ascending": torch.arange(n) * 1.0,
        "descending": -torch.arange(n) * 1.0,
    }[distribution]
    assert_right(rows(scores, -scores, k=300))


def test_b5_rows_without_scores():
    assert (select(rows([1.0] * 70, [1.0] * 70, k=37, lengths=[0, 0]))[0] == -1).all()
    call = rows([1.0] * 4096, [5.0] * 70, [1.0] * 4096, torch.randn(4096), k=512, lengths=[0, 1, 0, 4096])
    positions = assert_right(call)
    assert (positions[[0, 2]] == -1).all() and positions[1, 0] == 0 and (positions[1, 1:] == -1).all()


def test_b6_more_ties_than_places():
    scores = torch.zeros(8320)
    scores[torch.randperm(8320)[:100]] = 1.0
    positions = assert_right(rows(scores, k=2048))[0]
    assert len(positions.unique()) == 2048 and set(scores.nonzero().flatten().tolist()) <= set(positions.tolist())


def test_b6_scores_a_millionth_apart():
    scores = 1.0 + torch.arange(5000) * 1e-6
    shuffled = scores[torch.randperm(5000)]
    positions = assert_right(rows(shuffled, k=512))[0].long().cpu()
    assert torch.equal(shuffled[positions].sort().values, scores[-512:])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, float("-inf")])
def test_b7_of_equal_scores_the_first_are_chosen(value):
    call = rows([value] * 5000, k=512)
    for _ in range(2 if DEVICE == "cpu" else 20):
        assert torch.equal(assert_right(call)[0].cpu(), torch.arange(512, dtype=torch.int32))


def test_zero_and_negative_zero_are_tied():
    scores = torch.full((5000,), -1.0)
    scores[100:800] = torch.tensor([-0.0, 0.0]).repeat(350)
    positions = select(rows(scores, k=512))[1][0]
    assert positions.tolist() == list(range(100, 612))


def test_b8_negative_scores_win_over_what_is_not_there():
    positions = assert_right(rows([-5.0] * 130, k=256))[0]
    assert positions.tolist() == [*range(130), *[-1] * 126]
    assert_right(rows([-5.0] * 5001, k=256))


@pytest.mark.parametrize("n", [600, 5000])
def test_nan_ranks_below_everything(n):
    scores = torch.full((n,), float("-inf"))
    scores[::2], scores[1::4], scores[7::50] = float("nan"), -float("nan"), 1.0
    positions = assert_right(rows(scores, k=n // 6))[0]
    assert (
        torch.isin(torch.arange(7, n, 50), positions.cpu()).all() and not scores[positions.long().cpu()].isnan().any()
    )
    assert_right(rows(torch.full((n,), float("nan")), k=100))


@pytest.mark.parametrize(("width", "page"), [(257, 64), (300, 64), (513, 128), (4099, 2)])
def test_b11_widths_that_are_no_multiple_of_the_page(width, page):
    """Rows that start at no multiple of 16 bytes, in memory that ends with the last score."""
    call = rows(torch.randn(width), torch.randn(width), torch.randn(width), k=100, page=page)
    assert call.scores.stride(0) == width
    assert_right(call)


def test_strided_tensors_are_read_and_written_in_place():
    call = rows(torch.randn(600), torch.randn(500), k=37)
    wide = torch.full((2, 1000), float("nan"), device=DEVICE)
    table = torch.full((2, 99), 10**6, dtype=torch.int32, device=DEVICE)
    wide[:, 5:605], table[:, 3:13] = call.scores, call.page_tables
    strided = replace(call, scores=wide[:, 5:605], page_tables=table[:, 3:])
    for mine, theirs in zip(select(strided), select(call), strict=True):
        assert torch.equal(mine, theirs)


def test_what_lies_past_a_row_does_not_matter():
    call = one(B=3, max_len=9000, actual=8001, lengths="mixed")
    first = select(call)
    for filler in (float("inf"), float("-inf"), 0.0):
        scores = call.scores.clone()
        scores[scores.isnan()] = filler
        for mine, theirs in zip(select(replace(call, scores=scores)), first, strict=True):
            assert torch.equal(mine, theirs)


def test_lengths_are_clamped_to_the_scores_and_to_the_pages():
    call = rows(torch.randn(600), torch.randn(600), k=37)
    wild = replace(call, seq_lens=torch.tensor([2**31 - 1, -1], dtype=torch.int32, device=DEVICE))
    right = replace(call, seq_lens=torch.tensor([600, 0], dtype=torch.int32, device=DEVICE))
    assert torch.equal(select(wild)[0], select(right)[0])
    assert_right(replace(call, page_tables=call.page_tables[:, :2]))


def test_queries_of_one_request_share_its_pages():
    call = rows(*[torch.randn(300) for _ in range(6)], k=37)
    call.page_tables = call.page_tables[:2]
    for lens in ([300, 70], [[300], [70]], [[300, 10, 0], [70, 299, 38]]):
        assert_right(replace(call, seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE)))
    per_row = torch.tensor([298, 299, 300, 68, 69, 70], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([300, 70], dtype=torch.int32, device=DEVICE)
    assert torch.equal(select(replace(call, seq_lens=per_row))[0], select(replace(call, seq_lens=last))[0])


def test_raw_indices_and_workspace_may_be_left_out():
    call = one()
    out = torch.empty(2, 37, dtype=torch.int32, device=DEVICE)
    assert topk.topk_transform(call.scores, call.seq_lens, call.page_tables, out, 64) is None
    assert torch.equal(out, select(call)[0])


def test_the_number_of_programs_does_not_matter():
    call = one(B=2, max_len=30_000, actual=20_000, lengths="mixed")
    first = select(call)
    for config in (topk.Config(4, 1024, 1, 3), topk.Config(16, 4096, 3, 50)):
        for mine, theirs in zip(select(call, config=config), first, strict=True):
            assert torch.equal(mine, theirs)


def test_one_workspace_serves_calls_of_any_shape():
    workspace = torch.zeros(topk.workspace_shape(2, 30_000, 2048), dtype=torch.int32, device=DEVICE)
    for width, k in ((30_000, 37), (9000, 2048), (20_000, 600)):
        call = one(B=2, max_len=width, actual=width, k=k)
        out = torch.empty(2, k, dtype=torch.int32, device=DEVICE)
        topk.topk_transform(call.scores, call.seq_lens, call.page_tables, out, 64, workspace=workspace)
        assert torch.equal(out, *topk.reference(call))
        assert not workspace[:, -topk.ARRIVALS :].any()


def test_the_grid_does_not_depend_on_the_width():
    grids = []
    for width in (2048, 262_208):
        call = one(max_len=width, actual=100)
        out = torch.empty(2, 37, dtype=torch.int32)
        workspace = torch.empty(topk.workspace_shape(2, width, 37), dtype=torch.int32)
        grids.append([each[1] for each in topk.launches(call, out, None, workspace, arch="sm_90", sms=132)])
    assert grids[0] == grids[1]


def test_torch_as_a_peer_is_judged_by_its_scores():
    call = one(B=2, max_len=600, actual=600)
    expected = topk.reference(call)
    (found,) = topk.prepare("torch", call)()
    assert topk.judge(call, (found,), expected, expected).passed
    found[1, 3] = found[1, 4]
    assert topk.judge(call, (found,), expected, expected).error == float("inf")


def test_the_verdict_counts_what_was_missed():
    call = one(B=2, max_len=600, actual=600)
    (found,) = topk.prepare("triton", call)()
    (expected,) = topk.reference(call)
    assert topk.judge(call, (found,), (expected,), (expected,)).passed
    found[1, :5] = 10**6 + torch.arange(5, dtype=torch.int32, device=DEVICE)
    verdict = topk.judge(call, (found,), (expected,), (expected,))
    assert not verdict.passed and verdict.error == pytest.approx(5 / 37)
    found[1, :5] = -1
    assert topk.judge(call, (found,), (expected,), (expected,)).error == float("inf")


BAD = {
    r"scores must be float32 \[rows, width\]": lambda c: replace(c, scores=c.scores.double()),
    r"page_tables must be int32 \[B, width\]": lambda c: replace(c, page_tables=c.page_tables.long()),
    "page_tables must have a divisor of the 2 rows of scores, got 3": lambda c: replace(
        c, page_tables=c.page_tables[[0, 1, 1]]
    ),
    r"seq_lens must be int32 \[2\]": lambda c: replace(c, seq_lens=c.seq_lens.float()),
    "page_size must be a power of two, got 48": lambda c: replace(c, page_size=48),
    "scores must be at most 1048576 wide, got 1048577": lambda c: replace(
        c, scores=torch.zeros(1_048_577, device=DEVICE).expand(2, -1)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    call = BAD[message](one())
    out = torch.empty(2, 37, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        topk.topk_transform(call.scores, call.seq_lens, call.page_tables, out, call.page_size)


def test_bad_outputs_and_workspaces_are_named():
    call, out = one(), torch.empty(2, 37, dtype=torch.int32, device=DEVICE)

    def refused(message, out=out, **options):
        with pytest.raises(ValueError, match=message):
            topk.topk_transform(call.scores, call.seq_lens, call.page_tables, out, 64, **options)

    refused(r"out_page_indices must have 1 to 2048 columns, got 2049", out=out.new_empty(2, 2049))
    refused(r"out_page_indices must be int32 \[2, 37\]", out=out.float())
    refused(r"out_raw_indices must be int32 \[2, 37\]", out_raw_indices=out[:1])
    refused("maxima_ready needs the workspace", maxima_ready=True)
    refused(
        r"workspace must be int32, at least \[2, 1292\]",
        workspace=torch.empty(2, 1288, dtype=torch.int32, device=DEVICE),
    )
    refused(
        "workspace must have rows at multiples of 16", workspace=torch.empty(2, 1293, dtype=torch.int32, device=DEVICE)
    )
    with pytest.raises(ValueError, match=r"impl must be one of torch, triton, got 'fast'"):
        topk.prepare("fast", call)


def test_an_empty_batch_is_no_launch():
    call = one()
    out = torch.empty(0, 37, dtype=torch.int32, device=DEVICE)
    topk.topk_transform(call.scores[:0], call.seq_lens[:0], call.page_tables[:0], out, 64)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config(arch):
    (line,) = topk.describe(arch)
    assert line.startswith("triton")
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        topk.describe("sm_70")


@pytest.mark.gpu
@pytest.mark.parametrize("name", topk.CANDIDATES)
def test_every_candidate_config_is_right(name):
    call = one(B=9, max_len=70_000, actual=66_000, k=512, lengths="mixed")
    expected = topk.reference(call)
    assert topk.judge(call, topk.prepare(name, call)(), expected, expected).passed


@pytest.mark.gpu
def test_b10_rows_whose_bytes_pass_2_gib():
    call = rows([0.0] * 64, k=512)
    call.scores = torch.zeros(520, 1 << 20, device="cuda")
    call.scores[515, 1000:3000:2] = 1.0
    call.seq_lens = torch.full((520,), 5000, dtype=torch.int32, device="cuda")
    call.page_tables = torch.arange(1 << 14, dtype=torch.int32, device="cuda").expand(520, -1)
    positions = assert_right(call)
    assert positions[515].tolist() == list(range(1000, 2024, 2))


@pytest.mark.gpu
def test_b4_a_warm_up_covers_every_width_length_and_batch():
    topk.warm_up(ks=(512, 2048))
    with frozen():
        for B, width, k in ((1, 4097, 512), (7, 262_160, 512), (64, 1, 1), (3, 70_000, 2048), (16, 4096, 100)):
            call = one(B=B, max_len=width, actual=width, k=k, lengths="mixed")
            assert_right(call)
            assert_right(replace(call, scores=torch.nn.functional.pad(call.scores, (1, 0))[:, 1:]))


@pytest.mark.gpu
def test_b4_a_variant_is_never_first_compiled_in_a_capture():
    call = one(B=1, max_len=500, actual=500)
    call.page_size = 16
    out = torch.empty(1, 37, dtype=torch.int32, device="cuda")
    workspace = torch.empty(topk.workspace_shape(1, 500, 37), dtype=torch.int32, device="cuda")
    (step, *_) = topk.launches(call, out, None, workspace, maxima_ready=True, arch="sm_90", sms=132)
    assert not is_warm(*step)
    with pytest.raises(ColdKernel, match=r"capturing .* topk_kernel .*scores=float32\[1, 500\].*PAGE=16"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            topk.topk_transform(
                call.scores, call.seq_lens, call.page_tables, out, 16, workspace=workspace, maxima_ready=True
            )


@pytest.mark.gpu
def test_b3_nothing_but_the_kernels_runs(kernels_of):
    launch = topk.prepare("triton", one(B=32, max_len=262_208, actual=7000, k=512))
    launch()
    assert kernels_of(launch) == ["topk_kernel"]


@pytest.mark.gpu
def test_capture_at_64_rows_and_a_million_tokens_replays_other_lengths_bitwise():
    case = topk.Case("", 64, 262_208, 262_144, lengths="mixed")
    captured, other = topk.make_inputs(case, device="cuda", sets=2)
    launch = topk.prepare("triton", captured)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = launch()
    for live in (64, 5):
        for name in ("scores", "seq_lens", "page_tables"):
            getattr(captured, name).copy_(getattr(other, name))
        captured.seq_lens[live:], captured.page_tables[live:] = 0, 999_999
        out.fill_(CANARY)
        graph.replay()
        assert torch.equal(out, select(captured)[0]) and (out[live:] == -1).all()
        assert torch.equal(out, topk.reference(captured)[0])
