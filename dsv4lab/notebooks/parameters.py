"""Reads the one cell tagged `parameters` of a notebook, strictly, and checks what a run is asked to change in it."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from dsv4lab.notebooks.results import UsageError

TAG = "parameters"


@dataclass(frozen=True)
class Parameter:
    """A declared name, its default, and the names of the types it takes (`int | None` takes "int" and "NoneType")."""

    name: str
    default: Any
    types: frozenset[str]

    def parse(self, text: str) -> Any:
        """The value `text` stands for: a Python literal, `true` or `false`, or plain text where `str` is taken."""
        value: Any = {"true": True, "false": False}.get(text.lower(), text)
        if value is text:
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                value = text
        if type(value) is int and "int" not in self.types and "float" in self.types:
            value = float(value)
        if type(value).__name__ in self.types:
            return value
        if "str" in self.types:
            return text
        raise UsageError(f"parameter {self.name}={text} is no {' or '.join(sorted(self.types))}")


def declared(path: Path) -> dict[str, Parameter]:
    """The parameters that the notebook declares, in order; UsageError unless exactly one cell declares literals."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise UsageError(f"notebook {path} does not exist") from None
    except Exception as error:  # nbformat stumbles over a broken file in many ways
        raise UsageError(f"notebook {path} cannot be read: {str(error).splitlines()[0]}") from error
    cells = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise UsageError(f"notebook {path.name} has {len(cells)} cells tagged {TAG!r}, must have exactly one")
    try:
        statements = ast.parse(cells[0].source).body
    except SyntaxError as error:
        raise UsageError(f"notebook {path.name}, parameters cell, line {error.lineno}: {error.msg}") from error
    found = [_parameter(statement, path.name) for statement in statements]
    return {parameter.name: parameter for parameter in found}


def resolve(parameters: Mapping[str, Parameter], given: Sequence[str], notebook: str) -> dict[str, Any]:
    """The values that `given` ("NAME=VALUE") asks for; UsageError for a name not declared, a value of another type."""
    values = {}
    for assignment in given:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"parameter {assignment!r} must read NAME=VALUE")
        if name not in parameters:
            raise UsageError(f"parameter {name!r} is not declared by {notebook}; it has {', '.join(parameters)}")
        values[name] = parameters[name].parse(text)
    return values


def _parameter(statement: ast.stmt, notebook: str) -> Parameter:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            annotation = None
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
            pass
        case _:
            raise UsageError(
                f"notebook {notebook}, parameters cell: {ast.unparse(statement)!r} must read name = literal"
            )
    try:
        default = ast.literal_eval(value)
        types = {type(default).__name__} | _types(annotation)
    except (ValueError, SyntaxError):
        raise UsageError(f"notebook {notebook}, parameters cell: {ast.unparse(statement)!r} is no literal") from None
    return Parameter(name, default, frozenset(types))


def _types(annotation: ast.expr | None) -> set[str]:
    """The type names a value may have by its annotation, written plainly or as a string: "int | None", list[int]."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _types(left) | _types(right)
        case ast.Constant(value=str() as text):
            return _types(ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            return {"NoneType"}
        case ast.Subscript(value=value):
            return _types(value)
        case ast.Name(id=name):
            return {name}
    return set()
