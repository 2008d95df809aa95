"""What stands between a release of SGLang and DeepSeek-V4 with MTP: which conditions, which kernels, which names.

    python -m dsv4lab.serving.speculation sglang-0.5.14-*.whl ...      # writes serving/speculation.json

Read from the sources, nothing is imported. A condition is what must hold for a statement to be reached: the tests
around it, and those of the early returns before it. The tests compare the file with the installed SGLang.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv4lab.files import write_atomically
from dsv4lab.serving.contracts import read_wheel

PATH = Path(__file__).with_name("speculation.json")
V4 = "DeepseekV4ForCausalLM"

_ARGUMENTS = (
    "sglang/srt/server_args.py",
    "sglang/srt/arg_groups/overrides.py",
    "sglang/srt/arg_groups/deepseek_v4_hook.py",
    "sglang/srt/arg_groups/model_overrides/deepseek_v4.py",
)
_EXPERTS = "sglang/srt/layers/quantization/fp8.py"
_TRTLLM = "sglang/srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py"


def read() -> dict[str, dict]:
    """What was read from each release, by its version."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def summary(found: dict) -> dict[str, str]:
    """One release of `read` in words, on sm_120."""
    (forced,) = found["force_triton"]
    text = " and ".join(forced["conditions"])
    runners = {_kind(entry): entry["runner"] for entry in found["runners"]}
    methods = {entry["method"]: " ".join(entry["conditions"]) for entry in found["fp4_experts"]}
    cutlass = "sm120" in methods["Mxfp4FlashinferCutlassMoEMethod"]
    kernel = "CUTLASS" if cutlass else f"{', '.join(found['trtllm_kernels'])} (SM100)"
    return {
        "speculates with": ", ".join(found["algorithms"]),
        "draft forced to Triton on": "HIP alone" if "is_hip" in text else "any platform",
        "if the quantization is called": ", ".join(re.findall(r"quantization == '(\w+)'", text)),
        "and the architecture is DeepSeek-V4": "yes" if V4 in forced["architectures"] else "never",
        "runner for FP4 experts, auto": runners["fp4"],
        "flashinfer_mxfp4 runs": kernel,
        "runner for a hybrid NVFP4 checkpoint": runners.get("hybrid", "not recognised"),
    }


def _kind(runner: dict) -> str:
    """Of what checkpoint a runner of `gate` is."""
    return "hybrid" if runner["conditions"][-1].endswith("nvfp4_moe_meta is not None") else "fp4"


def gate(sources: dict[str, str]) -> dict:
    """What a release's sources, by path, say of the draft layer of DeepSeek-V4:

    force_triton: where the draft's experts are sent to Triton (file, architectures, conditions).
    runners: the MoE runner that V4 gets if none is asked for, with its conditions; the draft inherits it.
    fp4_experts: the class that does FP4 experts, with its conditions, in the order of the code.
    trtllm_kernels: what the last resort of these calls in FlashInfer. algorithms: those that V4 may speculate with.
    """
    return {
        "force_triton": [found for file in _ARGUMENTS for found in _forced(sources, file)],
        "runners": [found for file in _ARGUMENTS for found in _runners(sources, file)],
        "fp4_experts": list(_experts(sources[_EXPERTS])),
        "trtllm_kernels": _imported(sources[_TRTLLM], "flashinfer.fused_moe"),
        "algorithms": _algorithms(sources["sglang/srt/arg_groups/deepseek_v4_hook.py"]),
    }


def installed() -> dict[str, str]:
    """The sources of the installed SGLang that `gate` reads. ModuleNotFoundError without one."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("sglang is not installed", name="sglang")
    package = Path(spec.origin).parents[1]
    files = [*_ARGUMENTS, _EXPERTS, _TRTLLM]
    return {file: (package / file).read_text(encoding="utf-8") for file in files if (package / file).is_file()}


def _forced(sources: dict[str, str], file: str) -> Iterator[dict]:
    for value, conditions in _settings(sources.get(file, ""), "speculative_moe_runner_backend"):
        if value == "triton":
            yield {"file": file} | _split(conditions, sources[file])


def _runners(sources: dict[str, str], file: str) -> Iterator[dict]:
    for value, conditions in _settings(sources.get(file, ""), "moe_runner_backend"):
        split = _split(conditions, sources[file])
        if split["architectures"] == [V4] or file.endswith("_hook.py"):
            yield {"file": file, "runner": value, "conditions": split["conditions"]}


def _experts(source: str) -> Iterator[dict]:
    tree = ast.parse(source)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Return) and isinstance(n.value, ast.Call)]
    for node in sorted(calls, key=lambda node: node.lineno):
        name = getattr(node.value.func, "id", "")
        if name.startswith("Mxfp4"):
            tests = [ast.unparse(test) for test in _conditions(tree.body, node)]
            own = [test for test in tests if "fp4" in test or "is_sm" in test]
            yield {"method": name, "conditions": [test for test in own if not test.startswith("not (self.is_fp4")]}


def _imported(source: str, module: str) -> list[str]:
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module == module]
    return sorted(alias.name for node in nodes for alias in node.names)


def _algorithms(source: str) -> list[str]:
    """From the assertion on `speculative_algorithm`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and "speculative_algorithm" in ast.unparse(node.test):
            return _strings(node.test)
    raise ValueError("the hook of DeepSeek-V4 asserts nothing about speculative_algorithm")


def _settings(source: str, name: str) -> Iterator[tuple[str, list[ast.expr]]]:
    """Every string that `name` is set to, as an attribute, an entry or a keyword, with its conditions."""
    if name not in source:
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        pairs: list[tuple[Any, Any]] = []
        if isinstance(node, ast.Assign):
            pairs = [(getattr(t, "attr", getattr(t, "slice", None)), node.value) for t in node.targets]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            pairs = list(zip(node.value.keys, node.value.values, strict=True))
        for key, value in pairs:
            if getattr(key, "value", key) == name and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value, _conditions(tree.body, node)


def _conditions(body: list[ast.stmt], target: ast.stmt) -> list[ast.expr]:
    """The tests that must hold for `target`, which is somewhere in `body`, to be reached."""
    found: list[ast.expr] = []
    for statement in body:
        if all(node is not target for node in ast.walk(statement)):
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return | ast.Raise):
                found.append(_negated(statement.test))
            continue
        if statement is target:
            return found
        if isinstance(statement, ast.If):
            inside = any(node is target for part in statement.body for node in ast.walk(part))
            found.append(statement.test if inside else _negated(statement.test))
            return found + _conditions(statement.body if inside else statement.orelse, target)
        decorators = getattr(statement, "decorator_list", [])  # one may register a function for an architecture
        found += [each for each in decorators if ast.unparse(each).startswith("_register_for(")]
        return found + _conditions(list(ast.iter_child_nodes(statement)), target)
    return found


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn | ast.NotEq) and len(test.ops) == 1:
        positive = {ast.NotIn: ast.In, ast.NotEq: ast.Eq}[type(test.ops[0])]()
        return ast.Compare(test.left, [positive], test.comparators)
    return ast.UnaryOp(ast.Not(), test)


def _split(conditions: list[ast.expr], source: str) -> dict[str, list[str]]:
    """The architectures that the conditions allow, and the other conditions as text."""
    architectures, others = [], []
    for test in conditions:
        text = ast.unparse(test)
        if "model_arch" not in text and "architectures[0]" not in text and not text.startswith("_register_for("):
            others.append(text)
        elif not text.startswith("not "):
            architectures = _strings(test) or _constant(source, test)
    return {"architectures": architectures, "conditions": others}


def _strings(node: ast.AST) -> list[str]:
    return sorted(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _constant(source: str, test: ast.expr) -> list[str]:
    """The strings of the module's constant that `test` names."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and names & {getattr(t, "id", None) for t in node.targets}:
            return _strings(node.value)
    return []


def main() -> None:
    wheels = [Path(name) for name in sys.argv[1:]] or sys.exit("usage: python -m dsv4lab.serving.speculation WHEEL ...")
    found = {version: gate(sources) for version, sources in map(read_wheel, wheels)}
    write_atomically(PATH, json.dumps(found, indent=1) + "\n")
    print(*found)


if __name__ == "__main__":
    main()
