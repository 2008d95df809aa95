"""What a release of SGLang says of the functions we replace: their parameters, how they are called, where looked up.

    python -m dsv4lab.serving.contracts sglang-0.5.14-*.whl      # writes serving/snapshots/0.5.14.json

The snapshots are read from the wheels' sources, nothing is imported. The plugin compares the installed functions with
them, and the tests the table of `releases`.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

from dsv4lab.files import write_atomically
from dsv4lab.serving import releases

SNAPSHOTS = Path(__file__).parent / "snapshots"
_MODEL = "sglang/srt/models/deepseek_v4.py"
_ENVIRONMENT = "sglang/srt/environ.py"


def read(version: str) -> dict:
    """The snapshot of a release. ValueError if there is none."""
    path = SNAPSHOTS / f"{version}.json"
    if not path.is_file():
        raise ValueError(f"there is no contract of sglang {version}; there are {', '.join(releases.RELEASES)}")
    return json.loads(path.read_text(encoding="utf-8"))


def check(target: str, function: Callable, snapshot: dict) -> None:
    """ValueError unless `function` has the parameters that the snapshot has for `target`."""
    expected = snapshot["functions"][target]["parameters"]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(inspect.unwrap(function))
    found = [f"{stars.get(p.kind, '')}{name}" for name, p in signature.parameters.items()]
    if found != expected:
        raise ValueError(f"sglang.{target} has parameters {', '.join(found)}; the contract says {', '.join(expected)}")


def snapshot(wheel: Path) -> dict:
    """{version, rank_heads, environment, functions: {target: {parameters, lookups, calls}}} of an SGLang wheel.

    rank_heads: "first" or "in place", where a padded call carries the heads of a tensor-parallel rank.
    environment: the default of each variable that the table sets.
    """
    version, sources = read_wheel(wheel)
    release = releases.find(version)
    hooks = [release.attention, release.indexer, release.topk, release.mhc, release.gemm, release.gate, release.slots]
    hooks += [release.head, release.tables, *filter(None, [release.weights])]
    targets = [target for hook in hooks for target in hook.targets]
    targets += [release.layer_forward, release.backend_init]
    variables = {variable for hook in hooks for variable in hook.environment}
    return {
        "version": version,
        "rank_heads": _rank_heads(sources[_MODEL]),
        "environment": _defaults(sources[_ENVIRONMENT], variables),
        "sm120_probe": _has_name(sources, release.sm120_path.targets[0]),
        "functions": {target: _function(sources, target) for target in targets},
    }


def read_wheel(wheel: Path) -> tuple[str, dict[str, str]]:
    """The version of an SGLang wheel, and its Python sources by their paths."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("sglang/") and name.endswith(".py")]
        sources = {name: archive.read(name).decode("utf-8") for name in names}
    return re.match(r"sglang-([^-]+)-", wheel.name)[1], sources


def _function(sources: dict[str, str], target: str) -> dict:
    """The contract of one function or method."""
    path, names = _locate(sources, target)
    node: Any = ast.parse(sources[path])
    for name in names:
        node = next(n for n in node.body if getattr(n, "name", None) == name)
    contract: dict[str, Any] = {"file": path, "parameters": list(_names(node.args))}
    if len(names) == 1:
        contract |= _uses(sources, names[0], PurePosixPath(path))
    return contract


def _locate(sources: dict[str, str], target: str) -> tuple[str, list[str]]:
    """The file of a dotted target and the names below its module."""
    parts = f"sglang.{target}".split(".")
    depth = next(i for i in range(len(parts) - 1, 0, -1) if "/".join(parts[:i]) + ".py" in sources)
    return "/".join(parts[:depth]) + ".py", parts[depth:]


def _has_name(sources: dict[str, str], target: str) -> bool:
    path, (name,) = _locate(sources, target)
    return any(
        isinstance(node, ast.Assign) and any(getattr(t, "id", None) == name for t in node.targets)
        for node in ast.parse(sources[path]).body
    )


def _names(arguments: ast.arguments) -> Iterator[str]:
    yield from (argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _uses(sources: dict[str, str], name: str, home: PurePosixPath) -> dict:
    """Where other files get `name` from, and how it is called, under its own name or another one's."""
    homes = [str(home.with_suffix("")), *(str(parent) for parent in home.parents)]  # a package may hand it on
    lookups, calls = set(), {}
    for path, source in sources.items():
        if name not in source:
            continue
        tree = ast.parse(source)
        imports = list(_imports(tree, name, homes))
        lookups |= {f"{path}: imported {where}" for where in imports}
        if imports or PurePosixPath(path) == home:
            for call in _calls(tree, name):
                entry = {"file": path, "positional": len(call.args)}
                entry["keywords"] = sorted(keyword.arg or "**" for keyword in call.keywords)
                calls[json.dumps(entry)] = entry
    return {"lookups": sorted(lookups), "calls": [calls[key] for key in sorted(calls)]}


def _scopes(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """The module's own statements, then each function and method with all that is inside: (where, nodes)."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = [n for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, functions)]
    yield "at import", [n for s in tree.body if not isinstance(s, (*functions, ast.ClassDef)) for n in ast.walk(s)]
    for function in [n for n in tree.body if isinstance(n, functions)] + inside:
        yield f"in {function.name}", list(ast.walk(function))


def _imports(tree: ast.Module, name: str, homes: list[str]) -> Iterator[str]:
    for where, nodes in _scopes(tree):
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").replace(".", "/") in homes:
                if any(alias.name == name for alias in node.names):
                    yield where


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    everywhere = {name}
    for where, nodes in _scopes(tree):
        names = set(everywhere)
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname for alias in node.names if alias.name == name and alias.asname}
            elif isinstance(node, ast.Assign) and getattr(node.value, "id", None) == name:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if where == "at import":
            everywhere = names
        yield from (n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", None) in names)


def _rank_heads(model: str) -> str:
    """From the slice of a padded query that the model fills with the rank's own heads."""
    starts = re.findall(r"tp_slice = slice\((\w+)", model)
    filled = [start for start in starts if start != "None"]
    if len(set(filled)) != 1 or filled[0] not in ("0", "rank"):
        raise ValueError(f"{_MODEL} fills tp_slice in an unknown way: {filled}")
    return {"0": "first", "rank": "in place"}[filled[0]]


def _defaults(environ: str, variables: set[str]) -> dict[str, str]:
    found = {}
    for variable in sorted(variables):
        match = re.search(rf"^\s+{variable} = EnvBool\((True|False)\)", environ, re.MULTILINE)
        if match is None:
            raise ValueError(f"{_ENVIRONMENT} has no switch {variable}")
        found[variable] = "1" if match[1] == "True" else "0"
    return found


def main() -> None:
    wheels = [Path(name) for name in sys.argv[1:]] or sys.exit("usage: python -m dsv4lab.serving.contracts WHEEL ...")
    for wheel in wheels:
        found = snapshot(wheel)
        target = SNAPSHOTS / f"{found['version']}.json"
        write_atomically(target, json.dumps(found, indent=1) + "\n")
        print(target.name)


if __name__ == "__main__":
    main()
