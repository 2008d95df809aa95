import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import nbformat
import pytest

from dsv4lab.notebooks import Skipped, finish, parameters, report, run, skip
from dsv4lab.notebooks.results import RESULT_VARIABLE, Claim, Outcome, Report, Result, UsageError
from dsv4lab.notebooks.worker import Ended

ROOT = Path(__file__).parents[1]
FINISH = """from dsv4lab.notebooks import finish
finish(f"answer {batch}", [("batch is above 0", batch > 0, f"{batch=}")])"""


def write_notebook(path: Path, *cells: str, declares="live = False\nbatch = 1", tags=1, **metadata) -> Path:
    """A notebook of code cells with `tags` cells tagged parameters in front."""
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernelspec, **metadata})
    tagged = [nbformat.v4.new_code_cell(declares, metadata={"tags": ["parameters"]}) for _ in range(tags)]
    notebook.cells = [*tagged, *(nbformat.v4.new_code_cell(cell) for cell in cells)]
    nbformat.write(notebook, path)
    return path


def declare(tmp_path: Path, text: str) -> dict[str, parameters.Parameter]:
    return parameters.declared(write_notebook(tmp_path / "n.ipynb", declares=text))


@pytest.mark.parametrize("tags", [0, 2])
def test_a_notebook_has_exactly_one_parameters_cell(tmp_path, tags):
    path = write_notebook(tmp_path / "n.ipynb", "batch = 1", tags=tags)
    with pytest.raises(UsageError, match=f"n.ipynb has {tags} cells tagged 'parameters'"):
        parameters.declared(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import os", "import os"),
        ("batch = 2 ** 10", "batch = 2 \\*\\* 10"),
        ("a = b = 1", "a = b = 1"),
        ("a, b = 1, 2", "must read name = literal"),
        ("batch: int", "batch: int"),
        ("batch = ", "line 1"),
        ('batch: "int |" = 1', "batch"),
    ],
)
def test_parameters_are_literals(tmp_path, text, complaint):
    with pytest.raises(UsageError, match=complaint):
        declare(tmp_path, text)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"cells": 3}'])
def test_a_broken_notebook_is_one_line(tmp_path, content):
    path = tmp_path / "n.ipynb"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"n\.ipynb") as caught:
        parameters.declared(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "given", "value"),
    [
        ("x = 1", "64", 64),
        ("x = -1  # signed", "-2", -2),
        ("x = 1.5", "2", 2.0),
        ("x = False", "true", True),
        ("x = True", "False", False),
        ("x = 'cold'", "warm", "warm"),
        ("x = 'cold'", "64", "64"),
        ("x = 'cold'", "", ""),
        ("x = [1, 2]", "[3]", [3]),
        ('x: "int | None" = None', "8192", 8192),
        ("x: int | None = 3", "None", None),
        ("x: str | None = None", "records", "records"),
        ("x: list[int] = [1]", "[]", []),
    ],
)
def test_a_value_takes_the_type_of_its_default(tmp_path, declared, given, value):
    resolved = parameters.resolve(declare(tmp_path, declared), [f"x={given}"], "n.ipynb")
    assert resolved == {"x": value}
    assert type(resolved["x"]) is type(value)


@pytest.mark.parametrize(
    ("declared", "given"),
    [("x = 1", "1.5"), ("x = 1", "many"), ("x = 1", "true"), ("x = True", "1"), ("x = 1.0", "None"), ("x = [1]", "1")],
)
def test_a_value_of_another_type_is_refused(tmp_path, declared, given):
    with pytest.raises(UsageError, match=f"parameter x={given}"):
        parameters.resolve(declare(tmp_path, declared), [f"x={given}"], "n.ipynb")


@pytest.mark.parametrize("given", ["bacth=64", "batch", " =1"])
def test_a_name_that_is_not_declared_is_refused(tmp_path, given):
    with pytest.raises(UsageError, match=given.partition("=")[0]):
        parameters.resolve(declare(tmp_path, "batch = 1"), [given], "n.ipynb")


def test_plan_checks_every_notebook_before_any_runs(tmp_path):
    first = write_notebook(tmp_path / "first.ipynb")
    second = write_notebook(tmp_path / "second.ipynb", declares="live = False")
    with pytest.raises(UsageError, match=r"'batch' is not declared by second\.ipynb; it has live"):
        run.plan([str(first), str(second)], ["batch=2"], live=False, records=None)
    (job,) = run.plan([str(first)], ["batch=2"], live=True, records=tmp_path)
    assert job.values == job.changed == {"live": True, "batch": 2}  # records_dir is not declared there
    with pytest.raises(UsageError, match="'live' is set by --live"):
        run.plan([str(first)], ["live=True"], live=False, records=None)
    with pytest.raises(UsageError, match="first is named twice"):
        run.plan([str(first), str(first)], [], live=False, records=None)


def test_plan_passes_the_records_folder_to_those_that_declare_it(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", declares='live = False\nrecords_dir: "str | None" = None')
    (job,) = run.plan([str(path)], [], live=True, records=Path("new"))
    assert job.values == {"live": True, "records_dir": "new"}
    assert job.changed == {"live": True, "records_dir": str(Path("new").resolve())}
    (job,) = run.plan([str(path)], [], live=False, records=None)
    assert job.changed == {}  # what the notebook says already is not injected
    assert job.values == {"live": False, "records_dir": None}


def test_finish_records_every_claim_and_raises_for_those_that_do_not_hold(tmp_path, monkeypatch, capsys):
    path = tmp_path / "result.json"
    monkeypatch.setenv(RESULT_VARIABLE, str(path))
    finish("1.9x", [("faster", True, "1.9x")])
    assert Result.model_validate_json(path.read_text()).verdict == "passed"
    with pytest.raises(AssertionError, match="1 of 2 claims do not hold: 80x faster"):
        finish("79x", [("faster", True, "79x"), ("80x faster", False, "79x")])
    result = Result.model_validate_json(path.read_text())
    assert (result.verdict, [claim.holds for claim in result.claims]) == ("failed", [True, False])
    assert "DOES NOT HOLD: 80x faster (79x)" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["result.json"]


def test_finish_wants_an_answer_and_a_claim():
    with pytest.raises(ValueError, match="answer"):
        finish(" ", [("c", True, "e")])
    with pytest.raises(ValueError, match="claims"):
        finish("answer", [])


def test_nothing_is_written_outside_of_a_run(tmp_path, monkeypatch):
    monkeypatch.delenv(RESULT_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    finish("answer", [("c", True, "e")])
    with pytest.raises(Skipped, match="no GPU"):
        skip("no GPU")
    assert os.listdir(tmp_path) == []


CHILD = """import os, pathlib, subprocess
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")"""
CELLS = {
    "passed": [CHILD, FINISH],
    "other_kernel": ["import sys\nprint(sys.executable)", FINISH],
    "broken {cell}": ["x = 1", "raise ValueError('first line\\nsecond line')", FINISH],
    "false_claim": ["batch = -1", FINISH],
    "exits": ["import sys\nsys.exit(0)", FINISH],
    "killed": ["import os\nos.kill(os.getpid(), 9)", FINISH],
    "slow": ["import time\ntime.sleep(60)", FINISH],
    "skips": ["from dsv4lab.notebooks import skip\nskip('no GPU')", "raise SystemError('not reached')"],
    "unfinished": ["print('all cells ran')"],
    "pretends": ["from dsv4lab.notebooks import Skipped\nraise Skipped('but never said so')"],
}


@pytest.fixture(scope="module")
def batch(tmp_path_factory) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("notebooks")
    other = {"kernelspec": {"name": "dsv4lab-gpu", "display_name": "GPU", "language": "python"}}
    for name, cells in CELLS.items():
        write_notebook(folder / f"{name}.ipynb", *cells, **(other if name == "other_kernel" else {}))
    jobs = run.plan([str(folder / f"{name}.ipynb") for name in CELLS], ["batch=3"], live=False, records=None)
    return run.run(jobs, folder / "report", live=False, timeout=5), folder / "report"


@pytest.mark.parametrize(
    ("notebook", "verdict", "detail"),
    [
        ("passed", "passed", ""),
        ("other_kernel", "passed", ""),
        ("broken {cell}", "failed", "In [4]: ValueError: first line"),
        ("false_claim", "failed", "In [4]: AssertionError: 1 of 1 claims do not hold: batch is above 0"),
        ("exits", "failed", "In [3]: SystemExit ended the notebook"),
        ("killed", "died", "In [3]: the kernel was killed"),
        ("slow", "timed out", "In [3]: no end within 5 s"),
        ("skips", "skipped", ""),
        ("unfinished", "failed", "its last cell called no finish()"),
        ("pretends", "failed", "In [3]: Skipped: but never said so"),
    ],
)
def test_every_way_to_end_has_its_verdict(batch, notebook, verdict, detail):
    (outcome,) = [outcome for outcome in batch[0].outcomes if outcome.notebook == notebook]
    assert (outcome.verdict, outcome.detail) == (verdict, detail)
    assert outcome.parameters == {"live": False, "batch": 3}
    assert outcome.pages[:2] == (f"{notebook}.html", f"{notebook}.ipynb")
    assert all((batch[1] / page).stat().st_size for page in outcome.pages)


@pytest.mark.parametrize(
    ("ended", "said", "verdict"),
    [
        ("passed", "passed", "passed"),
        ("skipped", "skipped", "skipped"),
        ("passed", "failed", "failed"),
        ("passed", "skipped", "failed"),  # it said so and went on
        ("skipped", "passed", "failed"),
        ("died", "passed", "died"),
        (None, "passed", "died"),
    ],
)
def test_both_the_notebook_and_its_execution_have_a_say(tmp_path, ended, said, verdict):
    (tmp_path / "result.json").write_text(Result(verdict=said, answer="a").model_dump_json())
    if ended:
        (tmp_path / "ended.json").write_text(Ended(verdict=ended).model_dump_json())
    assert run._judge(tmp_path, 1)[0] == verdict


def test_a_batch_is_good_only_if_all_passed_or_were_skipped(batch):
    found = {outcome.notebook: outcome for outcome in batch[0].outcomes}
    assert not batch[0].good
    fine = batch[0].model_copy(update={"outcomes": (found["passed"], found["skips"])})
    assert fine.good


def test_answers_and_claims_reach_the_report_even_when_they_fail(batch):
    found = {outcome.notebook: outcome for outcome in batch[0].outcomes}
    assert found["passed"].answer == "answer 3"
    assert found["skips"].answer == "no GPU"
    assert found["false_claim"].claims == (Claim(text="batch is above 0", holds=False, evidence="batch=-1"),)


def test_the_kernel_is_the_interpreter_that_runs_the_batch(batch):
    executed = nbformat.read(batch[1] / "other_kernel.ipynb", as_version=4)
    assert sys.executable in [output.text.strip() for cell in executed.cells for output in cell.outputs]


def test_the_report_folder_holds_the_pages_and_nothing_else(batch):
    pages = {page for outcome in batch[0].outcomes for page in outcome.pages}
    assert set(os.listdir(batch[1])) == pages | {"index.html", "results.json"}
    assert "killed.log" in pages
    stored = Report.model_validate_json((batch[1] / "results.json").read_text())
    assert stored == batch[0]
    assert str(batch[1].parent) not in (batch[1] / "results.json").read_text()


def test_no_process_outlives_its_notebook(batch):
    assert not any(alive(int(pid)) for pid in (batch[1].parent / "pids").read_text().split())


def test_a_skipped_page_shows_no_error_banner(batch):
    assert "An Exception was encountered" not in (batch[1] / "skips.html").read_text()
    assert "An Exception was encountered" in (batch[1] / "false_claim.html").read_text()


def test_an_interrupt_ends_the_kernel_and_what_it_started(tmp_path):
    pids = tmp_path / "pids"  # notebooks run where they lie
    paths = [write_notebook(tmp_path / f"{name}.ipynb", CHILD, "child.wait()") for name in ("first", "second")]
    command = [sys.executable, "-m", "dsv4lab.cli", "run", "--no-live", *map(str, paths), "--out", f"{tmp_path}/out"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # in the background it is ignored
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    batch = subprocess.Popen(command, cwd=ROOT, preexec_fn=heard, **pipes)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2, seconds=60)
    batch.send_signal(signal.SIGINT)
    _, errors = batch.communicate(timeout=60)
    assert (batch.returncode, errors) == (130, "dsv4lab: interrupted\n")
    wait_for(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()), seconds=20)
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [outcome["verdict"] for outcome in stored["outcomes"]] == ["interrupted", "not run"]


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_the_page_shows_rows_claims_and_figures_and_escapes_them(tmp_path):
    figure = tmp_path / "kernel_time.svg"
    figure.write_text("<svg/>")
    claim = Claim(text="<80x>", holds=False, evidence="79 & a bit")
    outcome = Outcome(notebook="03_split_k", verdict="failed", seconds=90, claims=(claim,), pages=("p",))
    shared = {
        "mode": "live",
        "device": "NVIDIA H200",
        "date_utc": "2026-11-29T15:04:05+00:00",
        "versions": {"torch": "2"},
    }
    state = Report(**shared, outcomes=(outcome,))
    report.write(state, tmp_path, [figure])
    page = (tmp_path / "index.html").read_text()
    for text in (
        "03_split_k",
        "1.5",
        "&lt;80x&gt;",
        "not held",
        "79 &amp; a bit",
        "NVIDIA H200, 2026-11-29 15:04 UTC",
        'alt="kernel time"',
    ):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")
    assert report.line(outcome).startswith("failed       03_split_k")
