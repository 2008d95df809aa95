"""What the releases say of MTP for DeepSeek-V4, against their sources and against the installed one."""

import ast
import importlib.util
from importlib.metadata import PackageNotFoundError, version

import pytest

from dsv4lab.serving import releases, speculation

SOURCE = """
ARCHS = frozenset({"A", "B"})

def resolve(view):
    if view.model_arch not in ARCHS:
        return {}
    if not is_hip():
        return {}
    if not (view.quantization == "modelopt_fp4" and view.eagle):
        return {}
    if fp8():
        view.speculative_moe_runner_backend = "deep_gemm"
    elif cold:
        pass
    else:
        with log():
            view.speculative_moe_runner_backend = "triton"

@_register_for("DeepseekV4ForCausalLM")
def overrides(cfg):
    if cfg.moe_runner_backend == "auto":
        if is_sm120_supported():
            return {"moe_runner_backend": "marlin"}
        chosen["moe_runner_backend"] = "flashinfer_mxfp4"
"""


def test_a_statements_conditions_are_the_tests_around_and_before_it():
    found = dict(speculation._settings(SOURCE, "speculative_moe_runner_backend"))
    assert set(found) == {"deep_gemm", "triton"}
    split = speculation._split(found["triton"], SOURCE)
    assert split["architectures"] == ["A", "B"]
    assert split["conditions"] == [
        "is_hip()", "view.quantization == 'modelopt_fp4' and view.eagle", "not fp8()", "not cold"
    ]  # fmt: skip
    assert speculation._split(found["deep_gemm"], SOURCE)["conditions"][-1] == "fp8()"


def test_runners_are_found_as_attributes_entries_and_returned_keys():
    file = "sglang/srt/arg_groups/overrides.py"
    found = list(speculation._runners({file: SOURCE}, file))
    assert len(found) == 2
    by_runner = {entry["runner"]: entry["conditions"] for entry in found}
    assert by_runner["marlin"] == ["cfg.moe_runner_backend == 'auto'", "is_sm120_supported()"]
    assert by_runner["flashinfer_mxfp4"] == ["cfg.moe_runner_backend == 'auto'", "not is_sm120_supported()"]


def test_algorithms_come_from_the_assertion_on_them():
    assert speculation._algorithms("assert speculative_algorithm in ('EAGLE', 'DSPARK')") == ["DSPARK", "EAGLE"]
    with pytest.raises(ValueError, match="asserts nothing"):
        speculation._algorithms("assert topk == 1")


def test_experts_are_listed_in_the_order_of_the_code():
    source = "if self.is_fp4_experts and marlin():\n    return Mxfp4A()\nif self.is_fp4_experts:\n"
    source += "    if is_sm90():\n        return Mxfp4B()\n    return Mxfp4C()\nreturn Other()"
    found = list(speculation._experts(f"def f(self):\n    {source.replace(chr(10), chr(10) + '    ')}"))
    assert [entry["method"] for entry in found] == ["Mxfp4A", "Mxfp4B", "Mxfp4C"]
    assert found[1]["conditions"] == ["self.is_fp4_experts", "is_sm90()"]
    assert found[2]["conditions"] == ["self.is_fp4_experts", "not is_sm90()"]


def test_every_release_is_read_and_its_conditions_are_python():
    found = speculation.read()
    assert set(found) == set(releases.RELEASES)
    for entry in found.values():
        for condition in (
            c for part in (entry["force_triton"], entry["runners"]) for row in part for c in row["conditions"]
        ):
            ast.parse(condition)


@pytest.mark.parametrize("release", releases.RELEASES)
def test_the_gate_was_never_one_that_a_name_could_open(release):
    """Forcing Triton needs HIP and another architecture, whatever the quantization is called."""
    row = speculation.summary(speculation.read()[release])
    assert row["draft forced to Triton on"] == "HIP alone"
    assert row["if the quantization is called"] == "modelopt_fp4"
    assert row["and the architecture is DeepSeek-V4"] == "never"


def test_the_sm100_kernel_was_in_the_way_until_it_had_a_rival():
    rows = {release: speculation.summary(found) for release, found in speculation.read().items()}
    kernels = {release: row["flashinfer_mxfp4 runs"] for release, row in rows.items()}
    old, new = ("0.5.13.post1", "0.5.14", "0.5.15.post1"), ("0.5.16", "0.5.23")
    assert {kernels[release] for release in old} == {"trtllm_fp4_block_scale_routed_moe (SM100)"}
    assert {kernels[release] for release in new} == {"CUTLASS"}
    assert [rows[release]["runner for FP4 experts, auto"] for release in (*old, *new)] == ["marlin"] * 3 + [
        "flashinfer_mxfp4"
    ] * 2
    assert rows["0.5.13.post1"]["runner for a hybrid NVFP4 checkpoint"] == "not recognised"
    assert {rows[r]["runner for a hybrid NVFP4 checkpoint"] for r in rows if r != "0.5.13.post1"} == {
        "flashinfer_trtllm_routed"
    }


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_the_installed_sources_say_what_is_on_record():
    try:
        known = speculation.read()[version("sglang")]
    except (PackageNotFoundError, KeyError):
        pytest.skip("the installed sglang is of no known release")
    assert speculation.gate(speculation.installed()) == known
