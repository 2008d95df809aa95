import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from packaging.requirements import Requirement
from test_notebooks import FINISH, write_notebook

from dsv4lab.notebooks import parameters

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w.~>}])/(?:home|Users|root|work|workspace|mnt|tmp)/[\w+-]")
LONGEST_CELL = 12


def tracked() -> list[Path]:
    """Files in git, or that would be after `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def faults(notebook: NotebookNode) -> Iterator[str]:
    """What a chapter must not be; none for one that may ship."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "kernelspec is not python3"
    if sum(parameters.TAG in cell.metadata.get("tags", []) for cell in notebook.cells) != 1:
        yield "not exactly one parameters cell"
    if notebook.nbformat_minor < 5 or len({cell.get("id") for cell in notebook.cells} - {None}) < len(notebook.cells):
        yield "cells without an id of their own"
    if len({cell.execution_count is None for cell in code}) > 1:
        yield "some cells executed, others not"
    for cell in code:
        yield from cell_faults(cell)
    if not code or not calls_finish(code[-1].source):
        yield "the last cell does not end with finish()"


def cell_faults(cell: NotebookNode) -> Iterator[str]:
    if len(cell.source.splitlines()) > LONGEST_CELL:
        yield f"a cell of {len(cell.source.splitlines())} lines"
    if cell.outputs and cell.execution_count is None:
        yield "outputs without an execution count"
    if any(output.output_type == "error" for output in cell.outputs):
        yield "an error among the outputs"
    if MACHINE_PATH.search(str(cell)):
        yield "an absolute path"
    if "sys.path" in cell.source:
        yield "an edit of sys.path"
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        yield "a magic, a shell command or broken Python"
        return
    if any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in ast.walk(tree)):
        yield "a definition"


def calls_finish(source: str) -> bool:
    match ast.parse(source).body[-1:]:
        case [ast.Expr(ast.Call(func=ast.Name("finish") | ast.Attribute(attr="finish")))]:
            return True
    return False


def test_there_are_chapters():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_may_ship(path):
    assert list(faults(nbformat.read(path, as_version=4))) == []
    assert parameters.declared(path)["live"].default is False


@pytest.fixture
def chapter(tmp_path) -> NotebookNode:
    notebook = nbformat.read(write_notebook(tmp_path / "n.ipynb", "x = 1", FINISH), as_version=4)
    for count, cell in enumerate(notebook.cells, 1):
        cell.execution_count = count
    return notebook


def test_a_good_chapter_has_no_faults(chapter):
    assert list(faults(chapter)) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def f(): pass", "a definition"),
        ("if True:\n    class C: pass", "a definition"),
        ("%pip install torch", "a magic"),
        ("!nvidia-smi", "a magic"),
        ("%%bash\nls", "a magic"),
        ("import sys\nsys.path.insert(0, '..')", "sys.path"),
        ("open('/home/alice/x')", "an absolute path"),
        ("\n".join(["x = 1"] * 13), "a cell of 13 lines"),
    ],
)
def test_a_bad_cell_is_a_fault(chapter, source, fault):
    chapter.cells[1].source = source
    assert fault in " ".join(faults(chapter))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda n: n.metadata.kernelspec.update(name="dsv4lab-gpu"), "kernelspec"),
        (lambda n: n.metadata.pop("kernelspec"), "kernelspec"),
        (lambda n: n.cells[0].metadata.update(tags=[]), "parameters cell"),
        (lambda n: n.cells[1].metadata.update(tags=["parameters"]), "parameters cell"),
        (lambda n: n.cells[1].pop("id"), "an id"),
        (lambda n: n.cells[1].update(id=n.cells[0].id), "an id"),
        (lambda n: n.cells[1].update(execution_count=None), "others not"),
        (lambda n: n.cells[1].update(execution_count=None, outputs=[stream("1\n")]), "without an execution count"),
        (lambda n: n.cells[1].update(outputs=[stream("read /home/alice/records\n")]), "an absolute path"),
        (lambda n: n.cells[1].update(outputs=[error()]), "an error among the outputs"),
        (lambda n: n.cells.pop(), "the last cell"),
        (lambda n: n.cells[-1].update(source="finish"), "the last cell"),
        (lambda n: n.cells[-1].update(source="finish('a', [])\nprint()"), "the last cell"),
    ],
)
def test_a_bad_notebook_is_a_fault(chapter, change, fault):
    change(chapter)
    assert fault in " ".join(faults(chapter))


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return nbformat.v4.new_output("stream", name=name, text=text)


def error() -> NotebookNode:
    return nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])


BAR = """import sys
print('\\rcases: 100%|####| 3/3 [00:0{0}<00:00, {0}.50it/s]', file=sys.stderr)
print(f'{{1 + {1}}} us')"""


@pytest.mark.parametrize(
    ("seconds", "added", "passes"),
    [(1, 1, True), (2, 1, True), (1, 2, False)],
    ids=["same", "another progress bar", "another number"],
)
def test_nbval_overlooks_progress_bars_and_no_number(tmp_path, seconds, added, passes):
    path = write_notebook(tmp_path / "n.ipynb", BAR.format(seconds, added))
    notebook = nbformat.read(path, as_version=4)
    stored = [stream("cases: 100%|####| 3/3 [00:01<00:00, 1.50it/s]\n", "stderr"), stream("2 us\n")]
    notebook.cells[0].execution_count = 1
    notebook.cells[1].update(execution_count=2, outputs=stored)
    nbformat.write(notebook, path)
    assert nbval(path) is passes


def test_nbval_refuses_outputs_whose_counts_were_stripped(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", "print(1)")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].execution_count = 1
    notebook.cells[1].outputs = [stream("1\n")]
    nbformat.write(notebook, path)
    assert not nbval(path)


def nbval(path: Path) -> bool:
    flags = re.search(r"^NBVAL := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


def test_no_machine_path_in_any_tracked_file():
    found = []
    for path in tracked():
        if path.parent != ROOT / "tests":  # tests of this very rule have some
            text = path.read_bytes().decode("utf-8", errors="ignore")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def test_the_commands_of_the_readme_are_make_targets():
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"lab", "test"} <= named <= targets


def test_ci_runs_the_test_command_of_the_readme():
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"


def test_conda_installs_every_group_of_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (listed,) = re.findall(r"- -e \.\[(.*)\]", (ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert set(listed.split(",")) == set(project["optional-dependencies"])


def test_the_pinned_pair_is_one_that_the_kernels_allow():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = {r.name: str(r.specifier) for r in (Requirement(line) for line in lines if not line.startswith("#"))}
    for wanted in map(Requirement, project["optional-dependencies"]["kernels"]):
        assert pinned[wanted.name].startswith("==")
        assert wanted.specifier.contains(pinned[wanted.name].removeprefix("=="))
