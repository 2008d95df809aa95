import pytest
import torch

from dsv4lab import hardware
from dsv4lab.kernels import slots
from dsv4lab.kernels.launch import frozen

pytest_plugins = ["compiler_on"]

DEVICE = "cpu" if hardware.probe() is None else "cuda"
LENGTHS = [0, 1, 127, 128, 129, 255, 256, 640, 2047, 2048]


def table_of(rows: int, pages: int, seed: int = 0, device: str = DEVICE) -> torch.Tensor:
    """A page table as SGLang has them: garbage where nothing was written."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-(2**31), 2**31, (rows, pages), generator=generator).to(torch.int32)
    table[:, : pages - pages // 4] = torch.randint(0, 2**22, (rows, pages - pages // 4), generator=generator)
    return table.to(device)


def expected(page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    per_page = page_size // 128
    slot = page_table.long().unsqueeze(-1) * per_page + torch.arange(per_page, device=page_table.device)
    unseen = torch.arange(slot[0].numel(), device=page_table.device) >= (seq_lens // 128).unsqueeze(1)
    return slot.flatten(1).masked_fill(unseen, -1).to(torch.int32)


def lengths(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [128, 256, 384, 1024])
def test_slots_are_those_of_the_pages_a_row_has(dtype, page_size):
    for pages in (1, 3, 8):
        table, lens = table_of(len(LENGTHS), pages), lengths(LENGTHS, dtype)
        found = slots.c128_slots(table, lens, page_size)
        assert (found.dtype, found.shape) == (torch.int32, (len(LENGTHS), page_size // 128 * pages))
        assert torch.equal(found, expected(table, lens, page_size))


@pytest.mark.parametrize("pages", [511, 512, 513, 1600])
def test_a_wide_table_takes_several_programs_a_row(pages):
    lens = lengths([1024 * 128 - 1, 1024 * 128, 1025 * 128, pages * 256, pages * 256 + 5000, 2**31 - 1])
    table = table_of(len(lens), pages)
    assert torch.equal(slots.c128_slots(table, lens, 256), expected(table, lens, 256))


@pytest.mark.parametrize("length", [-1, -(2**31), 2**40])
def test_lengths_out_of_range_see_nothing_or_all(length):
    table, lens = table_of(2, 4), lengths([length, 300], torch.int64)
    found = slots.c128_slots(table, lens, 256)
    assert torch.equal(found, expected(table, lens.clamp(0, 1024), 256))


def test_rows_may_lie_apart_or_be_the_same():
    lens = lengths([500, 1000, 2000])
    wide = table_of(3, 32)
    for table in (wide[:, 8:16], wide[:, 5:12], wide[:1, :9].expand(3, -1), wide[:, ::32]):
        assert torch.equal(slots.c128_slots(table, lens, 256), expected(table, lens, 256))


def test_out_is_written_whole_and_pages_not_in_use_are_left_unread():
    table, lens = table_of(2, 600), lengths([300, 0])
    out = torch.full((2, 1200), 77, dtype=torch.int32, device=DEVICE)
    assert slots.c128_slots(table, lens, 256, out) is out
    assert torch.equal(out, expected(table, lens, 256))
    others = table.clone()
    others[0, 1:], others[1] = -5, -5
    assert torch.equal(slots.c128_slots(others, lens, 256), out)


def test_no_rows_and_no_pages_are_no_launch():
    for table in (table_of(0, 4), table_of(2, 0)):
        found = slots.c128_slots(table, lengths([9] * len(table)), 256)
        assert found.shape == (len(table), 2 * table.shape[1])


BAD = {
    "page_size must be a multiple of 128, got 64": {"page_size": 64},
    "page_size must be a multiple of 128, got 200": {"page_size": 200},
    r"page_table must be int32 \[bs, pages\] .*, got torch.int64 \[2, 4\]": {"page_table": table_of(2, 4).long()},
    r"page_table must be int32 .* strides \(8, 2\)": {"page_table": table_of(2, 8)[:, ::2]},
    r"page_table must be int32 .* \[8\]": {"page_table": table_of(1, 8)[0]},
    r"seq_lens must be contiguous int32 or int64 \[2\] .*, got torch.float32": {"seq_lens": lengths([1, 2]).float()},
    r"seq_lens must be .* \[2\] on .*, got torch.int32 \[3\]": {"seq_lens": lengths([1, 2, 3])},
    r"seq_lens must be .* strides \(2,\)": {"seq_lens": lengths([1, 2, 3, 4])[::2]},
    r"out must be contiguous int32 \[2, 8\] .*, got torch.int32 \[2, 4\]": {"out": table_of(2, 4)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    good = {"page_table": table_of(2, 4), "seq_lens": lengths([1, 2]), "page_size": 256}
    with pytest.raises(ValueError, match=message):
        slots.c128_slots(**good | BAD[message])


def test_a_warm_up_covers_every_shape(compiled):
    compiled("""
        from dsv4lab.kernels import slots
        driver.set_active(Loads("sm_120"))
        slots.warm_up("cpu")
        for whole in (torch.int32, torch.int64):
            for rows, pages, stride in ((1, 1, 1), (1, 4096, 4096), (7, 5, 6), (64, 8, 32), (300, 4095, 4095)):
                table = torch.empty(rows, stride, dtype=torch.int32)[:, stride - pages :]
                lens = torch.empty(rows + 1, dtype=whole)[1:]
                assert is_warm(*slots._launch(table, lens, 256, slots.empty(table, 256))), (rows, pages)
    """)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "pages"), [(1, 4096), (64, 4096), (3, 33)])
def test_on_the_gpu_a_captured_call_follows_tables_and_lengths(kernels_of, rows, pages, dtype):
    slots.warm_up()
    lens = lengths([(row * 7919 * 128 + 640) % (pages * 256) for row in range(rows)], dtype)
    table = table_of(rows, pages)
    out, graph = slots.empty(table, 256), torch.cuda.CUDAGraph()
    with frozen(), torch.cuda.graph(graph):
        slots.c128_slots(table, lens, 256, out)
    for seed in (1, 2):
        table.copy_(table_of(rows, pages, seed))
        lens.copy_((lens + 12_345 * seed) % (pages * 256 + 1))
        out.fill_(77)
        graph.replay()
        assert torch.equal(out, expected(table, lens, 256))
    assert kernels_of(lambda: slots.c128_slots(table, lens, 256, out)) == [slots.c128_slots_kernel.__name__]
