"""What the compiler makes of every shipped config, for GPUs that are not here: the evidence that the tables cite."""

import json
import os
import subprocess
import sys

import pytest
import triton

from dsv4lab import cards, hardware

STEMS = ("sparse_mla", "mqa_logits", "topk", "skinny_gemm", "hc_pre", "hc_head", "norm_rope")


MULTIPLYING = {"split_k_kernel", "gluon_kernel", "logits_kernel", "split_kernel"}
"""The kernels whose work is a matrix product."""


@pytest.fixture(scope="module", params=STEMS)
def compiled(request) -> tuple[dict, dict]:
    """(the committed cards, cards made now) of a module; a process of its own, since here the interpreter may be on."""
    code = f"import json; from dsv4lab import static; print(json.dumps(static.cards({request.param!r})))"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(cards.path(request.param).read_text(encoding="utf-8")), json.loads(run.stdout)


def test_the_committed_cards_are_what_the_compiler_says(compiled):
    committed, now = compiled
    if committed["triton"] != triton.__version__:
        pytest.skip(f"the cards were made with triton {committed['triton']}, here is {triton.__version__}")
    assert committed["cards"] == now


def test_products_keep_the_tensor_cores_and_all_kernels_the_wide_loads(compiled):
    for entries in compiled[1].values():
        for entry, kernels in entries.items():
            for name, card in kernels.items():
                assert card["mma"] > 0 or name not in MULTIPLYING
                assert card["load128"] > 0 or "unaligned" in entry, name


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_nothing_spills_where_it_cannot_be_measured(compiled, arch):
    for entries in compiled[1][arch].values():
        for card in entries.values():
            assert card["spill_bytes"] == 0 and card["local"] == 0


def test_nothing_spills_of_what_has_all_the_registers_of_an_sm(compiled):
    for kernels in compiled[1].get("sm_90", {}).values():
        if card := kernels.get("gluon_kernel"):
            assert card["spill_bytes"] == 0 and card["local"] == 0


@pytest.mark.parametrize(
    ("arch", "limit"), [("sm_89", 101_376), ("sm_90", 227 * 1024), ("sm_120", hardware.SM120_SHARED_MEMORY)]
)
def test_shared_memory_fits_a_block(compiled, arch, limit):
    for entries in compiled[1][arch].values():
        for card in entries.values():
            assert card["shared_bytes"] <= limit


def test_the_interpreter_is_refused():
    code = "from dsv4lab import static; static.cards('sparse_mla')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode and "TRITON_INTERPRET" in run.stderr
