import ast
import functools
import importlib.metadata
import inspect
import os
import sys
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
import torch

from dsv4lab import tuned
from dsv4lab.kernels import fp8_gemm, hc_head, hc_pre, mqa_logits, skinny_gemm, slots, sparse_mla, topk
from dsv4lab.serving import adapters, contracts, linears, plugin, receipts, releases, server_log, settings
from dsv4lab.tune import fp8_gemm as sglang_gemm

pytest_plugins = ["compiler_on"]

VERSIONS = sorted(releases.RELEASES)
ALL = "attention=split_k,indexer=triton,topk=triton,gemm=split_k,gate=split_k,slots=triton,head=split_k"


def hooks(release: releases.Release) -> list[releases.Hook]:
    names = "attention", "indexer", "topk", "gemm", "gate", "slots", "head"
    return [getattr(release, name) for name in names]


# the setting


def test_a_setting_says_what_is_active():
    setting = settings.parse(" attention=mma, topk=stock ,sm120_path=forced,version=0.5.14")
    assert setting.active == {"attention": "mma", "sm120_path": "forced"}
    assert settings.parse(str(setting)) == setting
    assert settings.parse("") == settings.Setting() and not settings.parse("").active


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("attention", "'attention' must read name=value"),
        ("attention=", "'attention=' must read name=value"),
        (
            "atention=mma",
            "there is no 'atention'; known: attention, indexer, topk, mhc, gemm, gate, slots, head, sm120_path, "
            "weights, tables, twice, version",
        ),
        ("attention=flash", "attention must be one of stock, simt, mma, split_k, gluon, got 'flash'"),
        ("topk=triton,topk=stock", "topk is given twice"),
    ],
)
def test_a_wrong_setting_is_named(text, says):
    with pytest.raises(ValueError, match=f"^DSV4LAB: {says}"):
        settings.parse(text)


def test_what_can_be_set_is_what_the_kernels_have():
    assert settings.CHOICES["attention"] == ("stock", *sparse_mla.IMPLEMENTATIONS)
    assert set(settings.CHOICES["indexer"]) <= {"stock", *adapters.TORCH_LOGITS, *mqa_logits.IMPLEMENTATIONS}
    assert set(settings.CHOICES["topk"]) <= {"stock", *topk.IMPLEMENTATIONS}
    assert set(settings.CHOICES["mhc"]) <= {"stock", "bf16", *hc_pre.IMPLEMENTATIONS}
    assert set(settings.CHOICES["gemm"]) <= {"stock", *fp8_gemm.IMPLEMENTATIONS}
    assert set(settings.CHOICES["head"]) <= {"stock", *hc_head.IMPLEMENTATIONS}
    assert set(settings.CHOICES["gate"]) <= {"stock", *skinny_gemm.IMPLEMENTATIONS}
    assert settings.CHOICES["slots"] == ("stock", *slots.IMPLEMENTATIONS)


# the table against the contracts of the wheels


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_is_hooked_where_it_looks(version):
    release, contract = releases.RELEASES[version], contracts.read(version)
    assert contract["version"] == version
    assert contract["sm120_probe"]
    assert contract["rank_heads"] == ("in place" if release.rank_function else "first")
    assert contract["environment"].keys() == {v for hook in hooks(release) for v in hook.environment}
    for hook in hooks(release):
        for target in hook.targets:
            function = contract["functions"][target]
            assert function["lookups"] or any(call["file"] == function["file"] for call in function["calls"])
    if release.weights:
        assert contract["functions"][release.weights.targets[0]]["parameters"][0] == "model"
    assert contract["functions"][release.layer_forward]["parameters"][:5] == ["self", "q", "k", "v", "layer"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_a_release_makes_is_one_that_ours_takes(version):
    release, contract = releases.RELEASES[version], contracts.read(version)
    around = linears.gemm(), linears.gate(), adapters.compression_metadata(), linears.head()
    ours = adapters.attention("split_k"), adapters.indexer("triton"), adapters.topk_transform
    ours += tuple(functools.partial(function, "original") for function in around)
    for hook, function in zip(hooks(release), ours, strict=True):
        calls = [call for target in hook.targets for call in contract["functions"][target]["calls"]]
        assert calls
        for call in calls:
            inspect.signature(function).bind(*range(call["positional"]), **dict.fromkeys(call["keywords"]))


def test_an_unknown_release_is_refused_unless_it_is_to_be_treated_as_a_known_one():
    with pytest.raises(ValueError, match=r"no hooks for sglang 0.6.0: known are .*version=ONE_OF_THEM"):
        releases.find("0.6.0")
    assert releases.find("0.6.0", "0.5.14") is releases.RELEASES["0.5.14"]
    with pytest.raises(ValueError, match=r"no hooks for sglang 9: it is none of 0.5.13.post1"):
        releases.find("0.5.14", "9")


def test_a_contract_is_read_from_sources():
    sources = {
        "sglang/a/home.py": "def f(x, *, y=1, **z): ...\n",
        "sglang/a/user.py": "from sglang.a import f\ndef g():\n    h = f\n    def k(): return h(1, y=2)\n",
        "sglang/a/other.py": "def g(f): return f(1, 2, 3)\n",
        "sglang/a/late.py": "class C:\n  def m(self):\n    from sglang.a.home import f as h\n    h(**self.all)\n",
        "sglang/a/named.py": "from sglang.a.home import f as h\nclass C:\n  def m(self): return h(1, 2, y=3)\n",
    }
    assert contracts._function(sources, "a.home.f") == {
        "file": "sglang/a/home.py",
        "parameters": ["x", "y", "**z"],
        "lookups": [
            "sglang/a/late.py: imported in m",
            "sglang/a/named.py: imported at import",
            "sglang/a/user.py: imported at import",
        ],
        "calls": [
            {"file": "sglang/a/late.py", "positional": 0, "keywords": ["**"]},
            {"file": "sglang/a/named.py", "positional": 2, "keywords": ["y"]},
            {"file": "sglang/a/user.py", "positional": 1, "keywords": ["y"]},
        ],
    }


# the plugin inside an SGLang made from a contract


class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"


class Registry:
    """As SGLang's: hooks are applied once a target, replacements first, and what fails is swallowed."""

    def __init__(self):
        self.hooks: dict[str, list] = {}
        self._patched: set[str] = set()
        self.deaf: set[str] = set()

    def register(self, target: str, hook: Callable, kind: HookType) -> None:
        self.hooks.setdefault(target, []).append((kind, hook))

    def apply_hooks(self) -> None:
        for target in self.hooks.keys() - self._patched - self.deaf:
            owner, name = plugin_owner(target)
            function = getattr(owner, name)
            for kind, hook in sorted(self.hooks[target], key=lambda item: item[0] is not HookType.REPLACE):
                function = wrapped(function, hook, kind)
            setattr(owner, name, function)
            self._patched.add(target)


def wrapped(original: Callable, hook: Callable, kind: HookType) -> Callable:
    if kind is HookType.REPLACE:
        return lambda *args, **kwargs: hook(*args, **kwargs)
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


def plugin_owner(target: str) -> tuple[object, str]:
    path, name = target.rsplit(".", 1)
    if path in sys.modules:
        return sys.modules[path], name
    module, owner = path.rsplit(".", 1)
    return getattr(sys.modules[module], owner), name


def stock(parameters: list[str], result: object = "stock") -> Callable:
    def function(*args, **kwargs):
        return result

    kinds = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}
    named = [(text.lstrip("*"), kinds.get(text[: len(text) - len(text.lstrip("*"))])) for text in parameters]
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind or inspect.Parameter.POSITIONAL_OR_KEYWORD) for name, kind in named]
    )
    return function


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    """Makes a release of SGLang out of its contract; returns its registry."""

    def make(version: str, sm120: bool = False, installed: str = "") -> Registry:
        release, registry = releases.RELEASES[version], Registry()
        functions = {t: stock(f["parameters"]) for t, f in contracts.read(version)["functions"].items()}
        functions[release.sm120_path.targets[0]] = stock([], sm120)
        if release.rank_function:
            functions[release.rank_function] = stock([], 1)
        for target, function in functions.items():
            parts = f"sglang.{target}".split(".")
            owner = parts.pop(-2) if parts[-2][0].isupper() else None
            for depth in range(1, len(parts)):
                name = ".".join(parts[:depth])
                if name not in sys.modules or not hasattr(sys.modules[name], "made_here"):
                    module = types.ModuleType(name)
                    module.made_here, module.__path__ = True, []
                    monkeypatch.setitem(sys.modules, name, module)
            place = sys.modules[".".join(parts[:-1])]
            if owner:
                place = vars(place).setdefault(owner, types.SimpleNamespace())
            setattr(place, parts[-1], function)
        hook_registry = types.ModuleType("sglang.srt.plugins.hook_registry")
        hook_registry.HookRegistry, hook_registry.HookType = registry, HookType
        monkeypatch.setitem(sys.modules, "sglang.srt.plugins", types.ModuleType("sglang.srt.plugins"))
        monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hook_registry)
        monkeypatch.setattr(plugin, "version", lambda name: installed or version)
        for variable in {v for hook in hooks(release) for v in hook.environment} - os.environ.keys():
            monkeypatch.delenv(variable, raising=False)
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)
        monkeypatch.setenv(receipts.VARIABLE, str(tmp_path))
        return registry

    return make


def found(target: str) -> Callable:
    owner, name = plugin_owner(f"sglang.{target}")
    return getattr(owner, name)


def registered(monkeypatch, setting: str) -> str:
    """Runs the plugin; returns what it said when it ended the process."""
    monkeypatch.setenv(settings.VARIABLE, setting)
    try:
        plugin.register()
    except SystemExit as end:
        return end.code
    return ""


def test_without_a_setting_the_plugin_does_nothing(monkeypatch, sglang, tmp_path):
    registry = sglang("0.5.14")
    for setting in ("", "attention=stock,version=0.5.14"):
        assert registered(monkeypatch, setting) == ""
    assert registry.hooks == {} and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plugin_hooks_every_release(monkeypatch, sglang, tmp_path, version):
    registry = sglang(version)
    assert registered(monkeypatch, f"{ALL},sm120_path=forced") == ""
    release = releases.RELEASES[version]
    targets = [target for hook in (*hooks(release), release.sm120_path) for target in hook.targets]
    assert registry._patched == {
        f"sglang.{target}" for target in [*targets, release.layer_forward, release.backend_init]
    }
    assert found(release.sm120_path.targets[0])() is True
    for hook in hooks(release):
        assert {variable: os.environ[variable] for variable in hook.environment} == hook.environment
    installed = receipts.read(tmp_path)
    assert {(r.kind, r.hook, r.impl, r.sglang) for r in installed} == {
        ("installed", hook, impl, version) for hook, impl in settings.parse(f"{ALL},sm120_path=forced").active.items()
    }


def test_no_error_at_all_lets_a_server_run_without_what_was_asked(monkeypatch, sglang):
    def broken(*_):
        raise RuntimeError("no kernel image is\navailable")

    sglang("0.5.14")
    monkeypatch.setattr(plugin, "install", broken)
    assert registered(monkeypatch, ALL) == "dsv4lab: RuntimeError: no kernel image is available"


def test_the_sm120_path_is_forced_before_the_modules_that_ask_are_imported(monkeypatch, sglang):
    sglang("0.5.14")
    asked = []
    monkeypatch.setattr(contracts, "check", lambda *_: asked.append(found("srt.utils.common.is_sm120_supported")()))
    registered(monkeypatch, f"{ALL},sm120_path=forced")
    assert asked and all(asked)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("attention=flash", "DSV4LAB: attention must be one of"),
        ("attention=split_k", "attention=split_k replaces SGLang's sm_120 attention, which this GPU does not take"),
        ("topk=triton,version=0.5.99", "no hooks for sglang 0.5.99"),
    ],
)
def test_what_cannot_be_had_ends_the_process(monkeypatch, sglang, setting, says):
    sglang("0.5.14")
    assert registered(monkeypatch, setting).startswith(f"dsv4lab: {says}")


def test_an_unknown_release_ends_the_process_unless_forced(monkeypatch, sglang):
    sglang("0.5.14", installed="0.5.99")
    assert "no hooks for sglang 0.5.99" in registered(monkeypatch, "topk=triton")
    assert registered(monkeypatch, "topk=triton,version=0.5.14") == ""


def test_a_function_that_no_longer_keeps_the_contract_ends_the_process(monkeypatch, sglang):
    sglang("0.5.14")
    sys.modules["sglang.jit_kernel.dsv4.topk"].topk_transform_512 = stock(["scores", "k"])
    assert "topk_transform_512 has parameters scores, k; the contract says" in registered(monkeypatch, "topk=triton")


def test_a_module_that_is_gone_ends_the_process(monkeypatch, sglang):
    sglang("0.5.14")
    monkeypatch.delitem(sys.modules, "sglang.jit_kernel.dsv4.topk")
    assert "No module named" in registered(monkeypatch, "topk=triton")


def test_a_hook_that_sglang_swallowed_ends_the_process(monkeypatch, sglang, tmp_path):
    registry = sglang("0.5.14")
    registry.deaf.add("sglang.jit_kernel.dsv4.topk.topk_transform_512")
    assert "did not apply the hook on jit_kernel.dsv4.topk" in registered(monkeypatch, "topk=triton")
    assert receipts.read(tmp_path) == []


@pytest.mark.parametrize(("value", "good"), [("0", True), ("False", True), ("1", False), ("junk", False)])
def test_an_environment_that_takes_another_path_ends_the_process(monkeypatch, sglang, value, good):
    sglang("0.5.14")
    monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", value)
    said = registered(monkeypatch, "topk=triton")
    assert said == "" if good else "topk=triton needs SGLANG_OPT_USE_TOPK_V2=0" in said


def test_a_hook_leaves_a_receipt_of_its_first_call(monkeypatch, sglang, tmp_path):
    sglang("0.5.14", sm120=True)
    assert registered(monkeypatch, "topk=triton") == ""
    (call,) = topk.make_inputs(topk.Case("small", 2, 600, 600), device="cpu")
    out = torch.empty(2, 512, dtype=torch.int32)
    for _ in range(2):
        found("jit_kernel.dsv4.topk.topk_transform_512")(call.scores, call.seq_lens, call.page_tables, out, 64)
    (live,) = [receipt for receipt in receipts.read(tmp_path) if receipt.kind == "live"]
    assert (live.hook, live.impl, live.rank, live.pid) == ("topk", "triton", 0, os.getpid())
    assert live.arguments["0"] == "float32[2, 600]" and live.arguments["3"] == "int32[2, 512]"


def test_attention_tells_of_its_heads_and_runs_before_sglangs_where_both_are_asked_for(monkeypatch, sglang, tmp_path):
    sglang("0.5.14", sm120=True)
    target, seen = releases.RELEASES["0.5.14"].attention.targets[0], []
    owner, name = plugin_owner(f"sglang.{target}")
    stock_one = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock_one)(lambda **call: seen.append(call["q"].shape)))
    assert registered(monkeypatch, "attention=gluon,twice=padded") == ""
    (call,) = sparse_mla.make_inputs(sparse_mla.Case("small", 2, 16, window=64, topk=0), device="cpu")
    monkeypatch.setattr(adapters._call, "heads", 8, raising=False)
    out, lse = found(target)(**vars(call), head_dim_v=512)
    assert out.shape == (2, 1, 16, 512) and lse is None and seen == [(2, 1, 16, 512)]
    live = {receipt.hook: receipt for receipt in receipts.read(tmp_path) if receipt.kind == "live"}
    assert live.keys() == {"attention", "twice"}
    assert live["attention"].arguments["q"] == "bfloat16[2, 1, 16, 512]"
    assert live["attention"].arguments["q of this rank"] == "bfloat16[2, 1, 8, 512]"
    assert live["attention"].impl == "gluon" and live["attention"].arguments["runs"].startswith("variant h16_n32_")
    assert "needs an attention of ours" in registered(monkeypatch, "twice=padded")


def test_random_weights_are_drawn_where_sglang_draws_its_dummy_ones(monkeypatch, sglang, tmp_path):
    sglang("0.5.14")
    assert registered(monkeypatch, "weights=random") == ""
    model = torch.nn.Linear(64, 32, bias=False)
    found("srt.model_loader.weight_utils.initialize_dummy_weights")(model)
    assert model.weight.detach().std() == pytest.approx(1 / 8, rel=0.1)
    assert receipts.missing(receipts.read(tmp_path), {"weights": "random"}, 1) == []
    sglang("0.5.13.post1")
    assert "sglang 0.5.13.post1 draws its weights after it has processed" in registered(monkeypatch, "weights=random")


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """The folder of tuned tables, with one for the GEMM; what the plugin does to the environment is undone."""
    root = tmp_path / "tuned"
    monkeypatch.setenv(tuned.VARIABLE, str(root))
    monkeypatch.setenv(tuned.MOE_VARIABLE, "")
    monkeypatch.delenv(tuned.MOE_VARIABLE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    tuned.write_sglang(tuned.gemm_path(root, "NVIDIA H200", 1536, 4096), {32: {"BLOCK_SIZE_M": 16}, 1: {}})
    return root


@pytest.mark.parametrize("version", VERSIONS)
def test_tuned_tables_go_before_sglangs_own(monkeypatch, sglang, tables, tmp_path, version):
    sglang(version)
    assert registered(monkeypatch, "tables=tuned") == ""
    lookup = found(releases.RELEASES[version].tables.targets[0])
    assert receipts.missing(receipts.read(tmp_path), {"tables": "tuned"}, 1)
    assert lookup(1536, 4096, 128, 128) == {32: {"BLOCK_SIZE_M": 16}, 1: {}}
    assert lookup(N=1536, K=1024, block_n=128, block_k=128) == lookup(1536, 4096, 64, 64) == "stock"
    assert receipts.missing(receipts.read(tmp_path), {"tables": "tuned"}, 1) == []
    assert tuned.MOE_VARIABLE not in os.environ  # it would hide SGLang's own tables, for none of ours


def test_sglang_is_led_to_tuned_moe_tables(monkeypatch, sglang, tables):
    sglang("0.5.14")
    tuned.write_sglang(tuned.moe_path(tables, "NVIDIA H200", "3.6.0", 256, 256), {1: {}})
    assert registered(monkeypatch, "tables=tuned") == ""
    assert os.environ[tuned.MOE_VARIABLE] == str(tables / "sglang")
    monkeypatch.setenv(tuned.MOE_VARIABLE, "elsewhere")
    assert "and the environment sets it to elsewhere" in registered(monkeypatch, "tables=tuned")


def test_tables_that_are_not_there_end_the_process(monkeypatch, sglang, tables):
    sglang("0.5.14")
    monkeypatch.setenv(tuned.VARIABLE, str(tables / "none"))
    assert "tables=tuned finds none in" in registered(monkeypatch, "tables=tuned")
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert "DSV4LAB_TUNED is empty" in registered(monkeypatch, "tables=tuned")


@pytest.mark.parametrize("version", VERSIONS)
def test_our_gemm_is_proven_by_a_call_that_it_took(monkeypatch, sglang, tmp_path, version):
    sglang(version)
    assert registered(monkeypatch, "gemm=split_k") == ""
    multiply = found(releases.RELEASES[version].gemm.targets[0])

    def lost_after(rows: int) -> tuple[object, list[str]]:
        (call,) = sglang_gemm.make_inputs(sglang_gemm.Case("", rows, 256, 128), device="cpu")
        out = multiply(call.unquantised, call.w, [128, 128], call.w_scale)
        return out, receipts.missing(receipts.read(tmp_path), {"gemm": "split_k"}, 1)

    assert lost_after(65) == ("stock", ["gemm=split_k is live on no rank, of 1 asked for"])
    out, lost = lost_after(3)
    assert out.shape == (3, 256) and lost == []
    (live,) = [receipt for receipt in receipts.read(tmp_path) if receipt.kind == "live"]
    assert live.arguments == {"0": "bfloat16[3, 128]", "1": "float8_e4m3fn[256, 128]", "2": "float32[2, 1]"}


@pytest.mark.parametrize("version", VERSIONS)
def test_our_gate_is_proven_by_a_call_that_it_took(monkeypatch, sglang, tmp_path, version):
    sglang(version)
    assert registered(monkeypatch, "gate=split_k") == ""
    multiply, weight = found(releases.RELEASES[version].gate.targets[0]), torch.ones(32, 64, dtype=torch.bfloat16)

    def lost_after(rows: int) -> tuple[object, list[str]]:
        out = multiply(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
        return out, receipts.missing(receipts.read(tmp_path), {"gate": "split_k"}, 1)

    assert lost_after(65) == ("stock", ["gate=split_k is live on no rank, of 1 asked for"])
    out, lost = lost_after(3)
    assert out.tolist() == [[64.0] * 32] * 3 and lost == []
    (live,) = [receipt for receipt in receipts.read(tmp_path) if receipt.kind == "live"]
    assert live.arguments == {"0": "bfloat16[3, 64]", "1": "bfloat16[32, 64]"}


@pytest.mark.parametrize("version", VERSIONS)
def test_our_slots_are_proven_by_a_call_that_asks_for_them(monkeypatch, sglang, tmp_path, version):
    sglang(version)
    target, asked = releases.RELEASES[version].slots.targets[0], []
    owner, name = plugin_owner(f"sglang.{target}")
    stock_one = functools.wraps(getattr(owner, name))(lambda *given: asked.append(given[-1]) or ("scalars", None))
    setattr(owner, name, stock_one)
    assert registered(monkeypatch, "slots=triton") == ""
    table, lens = torch.tensor([[7, 9]], dtype=torch.int32), torch.tensor([384], dtype=torch.int32)

    def lost_after(wanted: bool) -> tuple[tuple, list[str]]:
        result = found(target)(lens, lens - 1, lens, table, 256, compute_page_indices=wanted)
        return result, receipts.missing(receipts.read(tmp_path), {"slots": "triton"}, 1)

    assert lost_after(False) == (("scalars", None), ["slots=triton is live on no rank, of 1 asked for"])
    (scalars, slots_of_row), lost = lost_after(True)
    assert (scalars, slots_of_row.tolist(), lost, asked) == ("scalars", [[14, 15, 18, -1]], [], [False, False])
    (live,) = [receipt for receipt in receipts.read(tmp_path) if receipt.kind == "live"]
    assert live.arguments == {"0": "int32[1, 2]", "1": "int32[1]"}


@pytest.mark.parametrize("version", VERSIONS)
def test_our_mix_is_proven_by_a_call_that_it_took(monkeypatch, sglang, tmp_path, version):
    sglang(version)
    assert registered(monkeypatch, "head=split_k") == ""
    (call,) = hc_head.make_inputs(hc_head.Case("", 3, 64), device="cpu")

    def lost_after(**other) -> tuple[object, list[str]]:
        result = found(releases.RELEASES[version].head.targets[0])(*(vars(call) | other).values(), norm_eps=1, hc_eps=2)
        return result, receipts.missing(receipts.read(tmp_path), {"head": "split_k"}, 1)

    assert lost_after(x=call.x.half()) == ("stock", ["head=split_k is live on no rank, of 1 asked for"])
    y, lost = lost_after()
    assert (y.shape, lost) == ((3, 64), [])
    (live,) = [receipt for receipt in receipts.read(tmp_path) if receipt.kind == "live"]
    assert live.arguments["0"] == "bfloat16[3, 4, 64]" and live.arguments["1"] == "float32[4, 256]"


def test_the_forced_path_is_proven_by_the_stock_attention_being_called(monkeypatch, sglang, tmp_path):
    sglang("0.5.14")
    assert registered(monkeypatch, "sm120_path=forced") == ""
    assert receipts.missing(receipts.read(tmp_path), {"sm120_path": "forced"}, 1)
    assert found(releases.RELEASES["0.5.14"].attention.targets[0])(q=1) == "stock"
    assert receipts.missing(receipts.read(tmp_path), {"sm120_path": "forced"}, 1) == []


def test_a_call_that_fails_leaves_no_receipt(monkeypatch, sglang, tmp_path):
    sglang("0.5.14")
    registered(monkeypatch, "topk=triton")
    with pytest.raises(TypeError):
        found("jit_kernel.dsv4.topk.topk_transform_512")(1)
    assert {receipt.kind for receipt in receipts.read(tmp_path)} == {"installed"}


def test_no_receipt_is_written_where_no_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(receipts.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    receipts.write(receipt("topk", 1))
    assert list(tmp_path.iterdir()) == []


def receipt(hook: str, pid: int, rank: int = 0, impl: str = "triton") -> receipts.Receipt:
    return receipts.Receipt(kind="live", hook=hook, impl=impl, rank=rank, pid=pid, sglang="0.5.14")


def test_every_rank_must_have_called_every_hook():
    asked = {"indexer": "triton", "topk": "triton"}
    seen = [receipt("topk", 1, 0), receipt("topk", 2, 1), receipt("indexer", 2, 1)]
    assert receipts.missing(seen, asked, 2) == ["indexer=triton is live on ranks [1] only, of 2 asked for"]
    assert receipts.missing(seen[:2], asked, 2) == ["indexer=triton is live on no rank, of 2 asked for"]
    assert receipts.missing([*seen, receipt("indexer", 1, 0, "torch_fallback")], asked, 2)
    assert receipts.missing([*seen, receipt("indexer", 1, 0)], asked, 2) == []


def test_what_triton_compiles_in_a_server_is_counted_in_its_log(compiled):
    said = compiled("""
        import tempfile
        from dsv4lab.serving import plugin, receipts
        triton.knobs.cache.dir = tempfile.mkdtemp()
        heard = []
        triton.knobs.compilation.listener = lambda **event: heard.append(event["cache_hit"])
        plugin.os.environ[receipts.VARIABLE] = "somewhere"
        plugin.register()
        add.warmup(grid=(1,), **call()[1])
        add.device_caches.clear()
        add.warmup(grid=(1,), **call()[1])  # on disk by now
        assert heard == [False, True]
    """)
    assert server_log.compilations(said) == 1 and "Triton compiled add in " in said, said


def test_the_entry_point_is_the_plugin():
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="dsv4lab")
    assert entry.load() is plugin.register


def test_sglang_is_imported_only_inside_functions():
    for path in Path(plugin.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "sglang"], path.name
