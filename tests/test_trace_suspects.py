"""Each rule on a trace that shows what it looks for and on one that does not, kernels renamed or not."""

from dataclasses import replace

import pytest
from traces import SGLANG, Eager, event, kernel, write

from dsv4lab import trace
from dsv4lab.trace import attribution, reduced, suspects

BF16, FP8, FP32, INT = "c10::BFloat16", "c10::Float8_e4m3fn", "float", "int"
CAST = "aten::to > aten::_to_copy > aten::copy_"
B, PAGES, POSITIONS = 32, 4097, 262_208  # a context limit of 1M tokens, compressed by 4, in pages of 64


def stock() -> Eager:
    """A layer of a stock decode step as SGLang's fallbacks launch it, with the times that the H200 takes for them."""
    step = Eager()
    step.run("aten::zeros > aten::zero_", 2.5, [[B, 64, 512]], [BF16], grid=[512, 1, 1])
    step.run("aten::full > aten::fill_", 1.5, [[B, 64], []], [FP32, "Scalar"], grid=[4, 1, 1])
    step.run("", 3700, name="_tiled_sparse_decode_kernel", grid=[B, 64, 1])
    gathered, keys = [B, PAGES, 8192], [B, POSITIONS, 128]
    step.run(
        "aten::contiguous > aten::clone > aten::copy_",
        700,
        [gathered, gathered, []],
        [FP8, FP8, "Scalar"],
        grid=[9**6, 1, 1],
    )
    step.run(CAST, 1400, [gathered, gathered, []], [FP32, FP8, "Scalar"], grid=[9**6, 1, 1])
    step.run(
        "aten::bmm", 4000, [keys, [B, 128, 64]], [FP32, FP32], name="cutlass_80_simt_sgemm_128x64", grid=[2049, 1, 32]
    )
    step.run("aten::mul", 1000, [[B, POSITIONS, 64], [B, 1, 64]], [FP32, FP32], grid=[9**6, 1, 1])
    step.run("aten::sum", 500, [[B, POSITIONS, 64], []], [FP32, ""], grid=[9**6, 1, 1])
    step.run("aten::masked_fill_", 20, [[B, POSITIONS], [B, POSITIONS]], [FP32, "bool"], grid=[9**5, 1, 1])
    return step


def fixed() -> Eager:
    """The same step with kernels whose cost follows the real lengths, under the same context limit."""
    step = Eager()
    step.run("aten::empty", 1, [[B, 64, 512]], [BF16], grid=[200, 1, 1])
    step.run("", 24, name="split_k_kernel", grid=[B, 2, 4])
    step.run("", 4, name="combine_kernel", grid=[B * 64, 1, 1])
    step.run("aten::floor_divide", 1.5, [[B, PAGES], []], [INT, "Scalar"], grid=[129, 1, 1])
    step.run("lab::logits", 3, [[B, 1, 64, 128], [B, PAGES], [B, POSITIONS]], [FP8, INT, FP32], grid=[B, 66, 1])
    step.run("lab::topk", 3.5, [[B, POSITIONS], [B, 512]], [FP32, INT], grid=[B, 1, 1])
    step.run("aten::linear > aten::mm", 6, [[B, 16384], [16384, 24]], [BF16, BF16], name="nvjet_x", grid=[132, 1, 1])
    step.run("aten::mul", 3, [[B, 129_280], []], [FP32, "Scalar"], grid=[8080, 1, 1])  # logits over the vocabulary
    return step


@pytest.fixture(params=["as they are", "renamed"])
def find(request, tmp_path):
    """The suspects of a trace by rule, its kernels named as they are or by nothing."""

    def run(step: Eager | list[dict], **known) -> dict[str, suspects.Suspect]:
        events = step.events if isinstance(step, Eager) else step
        if request.param == "renamed":
            events = [each | {"name": f"k{len(each['name'])}"} if each["cat"] == "kernel" else each for each in events]
        head = {"deviceProperties": [{"name": "NVIDIA H200", "numSms": 132}]}
        taken = trace.read(write(tmp_path / "t.json", events, **head))
        return {suspect.rule: suspect for suspect in suspects.find(taken, **known)}

    return run


ROOT_CAUSES = {"max_context", "forced_fp32", "per_head_grid"}


def test_the_stock_step_shows_all_three_root_causes_and_the_fixed_one_none(find):
    found = find(stock())
    assert ROOT_CAUSES <= found.keys()
    assert next(iter(found)) == "max_context"  # the costliest first
    assert not ROOT_CAUSES & find(fixed()).keys()


def test_work_on_every_possible_position_is_found_by_its_pages(find):
    found = find(stock())["max_context"]
    assert found.ns == 1000 * (700 + 1400 + 4000 + 1000 + 500 + 20)
    assert "262,208 positions" in found.finding
    assert "aten::bmm [32, 262208, 128] fp32 x [32, 128, 64] fp32: 1 kernel, 4,000 µs" in found.evidence


def test_work_on_every_possible_position_is_found_by_what_the_user_knows(find):
    step = Eager().run("aten::mul", 900, [[B, POSITIONS, 64], [B, 1, 64]], [FP32, FP32], grid=[9**6, 1, 1])
    assert "max_context" not in find(step)
    assert "max_context" in find(step, max_context=1_048_576)
    assert "512 times what they have" in find(step, live=512)["max_context"].finding
    assert "max_context" not in find(step, max_context=65_536, live=100_000)


def test_a_fill_of_every_possible_position_is_named_with_its_shape(find):
    step = fixed().run("aten::full > aten::fill_", 9, [[B, POSITIONS], []], [FP32, "Scalar"], grid=[65_552, 1, 1])
    assert (
        find(step, max_context=1_048_576)["max_context"]
        .evidence[0]
        .startswith("aten::fill_ [32, 262208] fp32: 1 kernel")
    )


def test_a_kernel_too_fast_to_touch_the_long_tensor_is_no_suspect(find):
    step = Eager().run("lab::logits", 20, [[B, POSITIONS, 64], [B, PAGES]], [FP32, INT], grid=[B, 66, 1])
    assert "max_context" not in find(step, max_context=1_048_576)


def test_the_vocabulary_is_no_context(find):
    step = Eager().run("aten::mul", 900, [[B, 129_280], []], [FP32, "Scalar"], grid=[8080, 1, 1])
    assert "max_context" not in find(step, live=128)


@pytest.mark.parametrize("views", [([64, 1, 64, 512], [64, 64, 512]), ([256, 4, 16, 128], [256, 64, 128])])
def test_heads_in_two_views_are_no_positions(find, views):
    step = Eager().run("aten::mul", 900, list(views), [FP32, FP32], grid=[9**6, 1, 1])
    assert "max_context" not in find(step)


def test_weights_have_no_rows_for_positions(find):
    experts = [[B, 4096], [256, 4096, 4096], [256, 4096, 2048]]
    step = fixed().run("sglang::inplace_fused_experts", 560, experts, [BF16, FP8, FP8], grid=[6144, 1, 1])
    assert "max_context" not in find(step, live=512)


def test_the_pages_of_a_length_are_no_length_of_their_own(tmp_path):
    found = suspects.find(trace.read(stock().write(tmp_path / "t.json")), live=512)
    assert [suspect.finding for suspect in found if suspect.rule == "max_context"] == [
        "6 kernels over 262,208 positions of every request, 512 times what they have"
    ]


def linear(cast: list[str], gemm: list[str], name: str) -> Eager:
    step = Eager().run(CAST, 3, [[B, 16384], [B, 16384], []], [*cast, "Scalar"], grid=[512, 1, 1])
    return step.run("aten::linear > aten::mm", 13, [[B, 16384], [16384, 24]], gemm, name=name, grid=[128, 1, 1])


def test_a_name_that_speaks_of_tensor_cores_acquits(tmp_path):
    path = linear([FP32, BF16], [FP32, FP32], "cutlass_80_tensorop_s1688gemm").write(tmp_path / "t.json")
    assert "forced_fp32" not in {suspect.rule for suspect in suspects.find(trace.read(path))}


@pytest.mark.parametrize(
    ("cast", "gemm", "name", "guilty"),
    [
        ([FP32, BF16], [FP32, FP32], "cutlass_80_simt_sgemm_64x64", True),
        ([FP32, FP32], [FP32, FP32], "cutlass_80_simt_sgemm_64x64", False),  # it was FP32 all along
        ([BF16, FP32], [BF16, BF16], "nvjet_tst", False),
    ],
)
def test_fp32_gemms_of_narrower_inputs(find, cast, gemm, name, guilty):
    found = find(linear(cast, gemm, name))
    assert ("forced_fp32" in found) is guilty
    if guilty:
        assert found["forced_fp32"].evidence[0].endswith("after aten::copy_ [32, 16384] fp32 x [32, 16384] bf16")


def attention(dur: float, grid: list[int], shapes: list | None) -> Eager:
    return Eager().run("lab::attend" if shapes else "", dur, shapes or [], [BF16] * 3, name="attend", grid=grid)


@pytest.mark.parametrize(
    ("dur", "grid", "shapes", "guilty"),
    [
        (3700, [B, 64, 1], [[B, 1, 64, 512], [9000, 64, 1, 584]], True),
        (3700, [B * 64, 1, 1], [[B, 64, 512], [9000, 64, 1, 584]], True),
        (3700, [B, 32, 1], [[B, 32, 128], [9000, 64, 8, 128]], True),  # grouped-query attention
        (3700, [B, 32, 1], [[B, 32, 128], [9000, 64, 32, 128]], False),  # each head has keys of its own
        (3700, [B, 2, 4], [[B, 1, 64, 512], [9000, 64, 1, 584]], False),  # 32 heads a block
        (3, [B, 64, 1], [[B, 64, 512], [9000, 64, 1, 584]], False),  # no time to read anything twice
        (3700, [B, 64, 1], None, False),  # nothing says what the grid stands for
    ],
)
def test_a_block_for_each_row_and_head(find, dur, grid, shapes, guilty):
    assert ("per_head_grid" in find(attention(dur, grid, shapes))) is guilty


@pytest.mark.parametrize("op", ["", "sglang::unified_attention"])
def test_a_block_for_each_row_and_head_is_seen_by_what_is_launched_around_it(find, op):
    for width, guilty in ((512, True), (128, False)):  # heads of 128 may have keys of their own
        step = Eager().run("aten::zero_", 2, [[B, 64, width]], [BF16])
        step.run(op, 3700, [[B, 32768]] if op else [], [BF16], name="attend", grid=[B, 64, 1])
        assert ("per_head_grid" in find(step)) is guilty


def test_copies_that_change_only_layout_or_dtype(find):
    step = Eager()
    for width in (512, 64):
        strides = [[16 * width, width, 1], [9216, 576, 1], []]
        step.run(
            "aten::contiguous > aten::clone > aten::copy_",
            2,
            [[4, 16, width]] * 2 + [[]],
            [BF16, BF16, "Scalar"],
            strides=strides,
        )
    step.run(CAST, 2, [[B, 4096], [B, 4096], []], [FP32, BF16, "Scalar"]).run("aten::mm", 20)
    found = find(step)["needless_copies"]
    moved = 2 * 2 * 4 * 16 * (512 + 64) + (4 + 2) * B * 4096
    assert found.finding == f"3 copies of {moved / 1e6:,.1f} MB read and written, 1 to another dtype"
    assert any("aten::copy_ [4, 16, 512] bf16" in line for line in found.evidence)
    assert "needless_copies" not in find(step.run("aten::mm", 10_000))  # not worth a word


def test_copies_to_the_host_are_not_needless(find):
    events = Eager().run("aten::copy_", 5, [[B], [B], []], ["long int", "long int", "Scalar"]).events
    events[-1] |= {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)"}
    assert "needless_copies" not in find([*events, kernel("k", 5000, 5)])


def test_grids_smaller_than_the_gpu(find):
    found = find(Eager().run("aten::mm", 50, grid=[2, 32, 1]))["idle_sms"]
    assert "fewer blocks than the 132 SMs" in found.finding
    assert found.evidence[0].startswith("grid [2,32,1]: 1 launch, 50 µs")
    assert "idle_sms" not in find(Eager().run("aten::mm", 50, grid=[132, 1, 1]))
    assert "idle_sms" not in find(Eager().run("aten::mm", 2, grid=[2, 1, 1]))  # too short to matter


def test_thousands_of_tiny_launches(find):
    step = Eager()
    for _ in range(1100):
        step.run("aten::add", 3)
    assert find(step)["tiny_launches"].finding.startswith("1,100 kernels of under 10 µs")
    in_a_graph = [event("cuda_runtime", "cudaGraphLaunch", 1, 2, correlation=1)]
    in_a_graph += [
        each | {"args": each["args"] | {"correlation": 1}} for each in step.events if each["cat"] == "kernel"
    ]
    assert "tiny_launches" not in find(in_a_graph)


def test_exposed_collectives(find):
    reduce = {"Collective name": "allreduce", "Group size": 2}
    beside = [kernel("gemm", 0, 100), kernel("ncclDevKernel_AllReduce", 10, 80, stream=20, **reduce)]
    behind = [kernel("gemm", 0, 100), kernel("ncclDevKernel_AllReduce", 60, 80, stream=20, **reduce)]
    assert find(behind)["exposed_communication"].ns == 40_000
    assert "exposed_communication" not in find(beside)


def test_the_line_of_python_is_named(tmp_path):
    events = stock().events
    events.append(event("python_function", "site-packages/sglang/indexer.py(155): fp8_logits", 0, 10**6))
    found = suspects.find(trace.read(write(tmp_path / "t.json", events)))
    assert found[0].where == "sglang/indexer.py(155): fp8_logits"


def test_the_line_of_python_is_that_of_the_caller_and_not_of_the_launcher(tmp_path):
    events = stock().events
    for depth, frame in enumerate(("sglang/attention.py(208): decode", "triton/runtime/jit.py(695): run")):
        events.append(event("python_function", f"site-packages/{frame}", depth, 10**6 - 2 * depth))
    taken = trace.read(write(tmp_path / "t.json", events))
    assert taken.events["stack"].unique().tolist() == [
        "triton/runtime/jit.py(695): run < sglang/attention.py(208): decode"
    ]
    assert suspects.find(taken)[0].where == "sglang/attention.py(208): decode"


def test_a_replay_joined_with_its_eager_trace_shows_the_same(tmp_path):
    step = stock()
    kernels = [each | {"args": each["args"] | {"correlation": 1}} for each in step.events if each["cat"] == "kernel"]
    replay = [event("cuda_runtime", "cudaGraphLaunch", 1, 2, correlation=1), *kernels]
    path = write(tmp_path / "replay.json", replay)
    alone = trace.read(path)
    assert suspects.unseen(alone) == 1
    assert not ROOT_CAUSES & {suspect.rule for suspect in suspects.find(alone)}
    taken = trace.read(path, capture=step.write(tmp_path / "eager.json"))
    assert ROOT_CAUSES <= {suspect.rule for suspect in suspects.find(taken)}
    assert suspects.unseen(taken) == 0  # the attention kernel has no op there either, but was launched eagerly


def test_our_own_trace_shows_none_of_the_root_causes():
    assert [suspect.rule for suspect in suspects.find(trace.read(SGLANG))] == ["idle_sms"]


@pytest.fixture(scope="module")
def served():
    """Steps of a live SGLang with shapes, on an H200 at batch 32: `stock`, and `indexer` with every fix."""
    return {stage: trace.read(reduced.newest(stage, "eager")) for stage in ("stock", "indexer")}


def accused(taken: trace.Trace, **known) -> set[str]:
    return ROOT_CAUSES & {suspect.rule for suspect in suspects.find(taken, **known)}


@pytest.mark.parametrize(
    "known", [{}, {"max_context": 1_048_576}, {"live": 512}, {"max_context": 1_048_576, "live": 512}]
)
def test_a_served_stock_step_shows_all_three_root_causes_and_the_fixed_one_none(served, known):
    assert accused(served["stock"], **known) == ROOT_CAUSES
    assert not accused(served["indexer"], **known)


def test_so_it_does_without_its_kernels_names(served):
    for stage, expected in (("stock", ROOT_CAUSES), ("indexer", set())):
        events = served[stage].events
        nameless = events["name"].cat.rename_categories([f"k{n}" for n in range(events["name"].cat.categories.size)])
        assert accused(replace(served[stage], events=events.assign(name=nameless))) == expected


def test_the_stages_between_show_what_is_left_by_the_shapes_of_stock(served):
    split_k = attribution.joined(trace.read(reduced.newest("split_k", "graph")), served["stock"])
    assert accused(split_k) == {"max_context", "forced_fp32"}
    capped = attribution.joined(trace.read(reduced.newest("stock_ctx8192", "graph")), served["stock"])
    assert "max_context" not in accused(capped)
