import os
import subprocess
import sys
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules, resolve_name

import pytest
import torch
from test_notebooks import FINISH, write_notebook

from dsv4lab import cli, doctor, experiments, flip, hardware, kernels, measure, timing, tune, tuned
from dsv4lab.kernels.choices import source_hash
from dsv4lab.notebooks import run as batch

ROOT = Path(__file__).parents[1]
H200 = {"name": "NVIDIA H200", "count": 1, "capability": (9, 0), "sms": 132}


@pytest.fixture
def notebook(tmp_path: Path) -> str:
    return str(write_notebook(tmp_path / "n.ipynb", FINISH))


def status(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    return caught.value.code


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["-p", "bacth=64"], "'bacth' is not declared by n.ipynb; it has live, batch"),
        (["-p", "batch=many"], "parameter batch=many is no int"),
        (["-p", "batch"], "'batch' must read NAME=VALUE"),
        (["missing.ipynb"], "notebook 'missing.ipynb' does not exist; there are"),
        (["--out", "/dev/null/report"], "--out /dev/null/report cannot be written to"),
        (["--records", "/dev/null"], "--records /dev/null cannot be written to"),
        (["--live", "--no-live"], "exclude each other"),
        (["--timeout", "0"], "--timeout must be at least 1 second, got 0"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_status_2(notebook, capsys, monkeypatch, args, complaint):
    monkeypatch.setattr(batch, "_chapters", lambda: [Path("03_split_k.ipynb")])
    monkeypatch.setattr(batch, "_execute", lambda *_: pytest.fail("a notebook was executed"))
    assert status("run", notebook, *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dsv4lab: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize("command", ["run", "measure", "tune", "cards", "profile", "doctor"])
def test_help_teaches_with_an_example(capsys, command):
    assert status(command, "--help") == 0
    assert f"Example: dsv4lab {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "flags", "live"),
    [(H200, [], True), (None, [], False), (H200, ["--no-live"], False), (None, ["--live"], True)],
)
def test_a_run_is_live_where_there_is_a_gpu_unless_told_otherwise(notebook, monkeypatch, gpu, flags, live):
    seen = {}
    monkeypatch.setattr(hardware, "probe", lambda: gpu)
    monkeypatch.setattr(batch, "run", lambda jobs, out, live, timeout: seen.update(jobs=jobs, live=live) or Good)
    assert status("run", notebook, *flags) == 0
    assert seen["live"] is live
    assert seen["jobs"][0].values["live"] is live


class Good:
    good = True


def test_a_run_without_installation_prints_its_parameters_and_one_verdict(notebook, tmp_path):
    command = [sys.executable, "-m", "dsv4lab.cli", "run", notebook, "--no-live", "-p", "batch=7", "--out"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, str(tmp_path / "r")], cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")  # no progress bar where no terminal is
    assert lines[0] == "n: live=False batch=7"
    assert lines[1].startswith("passed") and lines[1].endswith("answer 7")
    assert lines[2].startswith("report: ") and len(lines) == 3


def test_a_failed_notebook_is_status_1(tmp_path):
    bad = write_notebook(tmp_path / "bad.ipynb", "1 / 0")
    assert status("run", str(bad), "--no-live", "--out", str(tmp_path / "r")) == 1


@pytest.mark.parametrize("folder", ["{braces}", "a b"])
def test_a_folder_may_have_any_name(tmp_path, folder):
    (tmp_path / folder).mkdir()
    path = write_notebook(tmp_path / folder / "n.ipynb", FINISH)
    assert status("run", str(path), "--no-live", "--out", str(tmp_path / folder / "r")) == 0


def test_measure_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(hardware, "probe", lambda: None)
    assert status("measure", "sparse_mla") == 2
    assert "sparse_mla needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (None, 0, "recorded: sparse_mla_decode_h200.jsonl"),
        (ValueError("cases has no 'b33'; known: b1"), 2, "dsv4lab: cases has no 'b33'; known: b1"),
        (FileNotFoundError("say where the records are"), 2, "dsv4lab: say where the records are"),
        (measure.CheckFailed("split_k: error 1 above 0.01"), 1, "dsv4lab: split_k: error 1 above 0.01"),
    ],
)
def test_measure_passes_its_arguments_on_and_says_how_it_ended(monkeypatch, capsys, tmp_path, error, code, says):
    seen = []

    def fake(stem, *, cases=None, peers=False, **options):
        seen.append((stem, dict(cases=cases, peers=peers, **options)))
        if error:
            raise error
        return "sparse_mla_decode_h200.jsonl"

    monkeypatch.setattr(hardware, "probe", lambda: H200)
    monkeypatch.setattr(measure, "run", fake)
    assert status("measure", "sparse_mla", "--peers", "--case", "b1", "--case", "b4", "--out", str(tmp_path)) == code
    assert seen == [("sparse_mla", {"cases": ("b1", "b4"), "peers": True, "directory": tmp_path})]
    assert "".join(capsys.readouterr()).strip() == says


def test_doctor_names_what_is_missing_and_the_command_that_mends_it(monkeypatch, capsys):
    have = {"pandas": "2.3", "numpy": "2", "packaging": "26", "pydantic": "2.9", "tqdm": "4", "tyro": "1.1"}
    monkeypatch.setattr(doctor, "_installed", have.get)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(hardware, "probe", lambda: None)
    assert status("doctor") == 1
    out = capsys.readouterr().out
    assert "missing: torch>=2.11" in out
    assert "-> pip install -c constraints/cpu.txt -e '.[kernels]'" in out
    assert "-> pip install -e '.[serve]'" in out
    assert out.rstrip().endswith("run the commands marked with -> above")


def test_doctor_sees_a_version_that_is_too_old(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    core = next(finding for finding in doctor._packages() if finding.subject == "core")
    assert core.broken
    assert "pandas>=2.2" in core.text
    assert core.fix == "pip install -e '.'"


@pytest.mark.parametrize(
    ("gpu", "says", "fix"),
    [
        (H200, "NVIDIA H200, sm_90, 132 SMs, 1 here: live mode; peaks 4.80 TB/s", ""),
        (H200 | {"name": "NVIDIA Unheard"}, "datasheet peaks are unknown", "add it to GPUS in dsv4lab/hardware.py"),
        (None, "none: kernels are interpreted", ""),
    ],
)
def test_doctor_names_the_gpu_and_its_entry(monkeypatch, gpu, says, fix):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor._gpu(gpu)
    assert says in finding.text
    assert finding.fix == fix
    assert not finding.broken


def test_doctor_sees_a_torch_that_does_not_load(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", raise_os_error)
    (finding,) = doctor._kernels(None)
    assert finding.broken
    assert "libcudart.so.13" in finding.text


@pytest.mark.parametrize(
    ("capability", "says"), [((9, 0), "sparse_mla: split_k"), ((7, 0), "sparse_mla has none for sm_70")]
)
def test_doctor_names_the_configs_of_the_gpu(capability, says):
    texts = [found.text for found in doctor._kernels(H200 | {"capability": capability}) if found.subject == "configs"]
    assert any(text.startswith(says) for text in texts)


@pytest.fixture
def tables(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    return tmp_path


def test_doctor_tells_which_tuned_tables_are_used(monkeypatch, tables):
    gpu, table = H200["name"], {"sha256": "a" * 64, "triton": doctor._installed("triton")}
    (nothing,) = doctor._tuned(H200)
    assert "nothing for this GPU in" in nothing.text and nothing.fix == "dsv4lab tune"
    tuned.write_sglang(tuned.gemm_path(tables, gpu, 1536, 4096), {1: {}})
    tuned.write_sglang(tuned.gemm_path(tables, "NVIDIA H100", 1536, 4096), {1: {}})
    tuned.write_kernel(tables, gpu, "topk", table)
    tuned.write_kernel(tables, gpu, "sparse_mla", table | {"sha256": source_hash("dsv4lab.kernels.sparse_mla")})
    found = {finding.text.split(":")[0]: finding for finding in doctor._tuned(H200)}
    assert found["FP8 GEMM"].text.startswith("FP8 GEMM: 1 tables for SGLang: hooks tables=tuned")
    assert found["topk"].text == "topk: not used, made for another version of the kernel"
    assert found["topk"].fix == "dsv4lab tune indexer"
    assert found["sparse_mla"].text == f"sparse_mla: used ({tables / 'h200.json'})"
    (tables / "h200.json").write_text("{")
    assert "h200.json: " in list(doctor._tuned(H200))[-1].text
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert [finding.text for finding in doctor._tuned(H200)] == ["turned off: DSV4LAB_TUNED is empty"]


@pytest.mark.parametrize(("left", "code"), [([], 0), (["n1_k1_m1"], 1)])
def test_tune_says_what_it_wrote_and_what_is_left(monkeypatch, capsys, tmp_path, left, code):
    asked = {}
    outcome = tune.Outcome(tmp_path / "record", [tmp_path / "table"], left)
    monkeypatch.setattr(hardware, "probe", lambda: H200)
    monkeypatch.setattr(tune, "run", lambda names, **options: asked.update(options, names=names) or {"moe": outcome})
    assert status("tune", "moe", "--tp", "8", "--budget-s", "60") == code
    assert asked == {"names": ("moe",), "tp": 8, "budget_s": 60.0, "jobs": None, "directory": None}
    out = capsys.readouterr().out
    assert f"moe: {tmp_path / 'table'}\nmoe: recorded: {tmp_path / 'record'}\n" in out
    assert ("1 shapes are left (n1_k1_m1, ...): run the same command again" in out) is bool(left)


def test_tune_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(hardware, "probe", lambda: None)
    assert status("tune") == 2
    assert "tune needs a CUDA GPU" in capsys.readouterr().err


def raise_os_error(name: str):
    raise OSError("libcudart.so.13: cannot open shared object file")


def test_doctor_on_this_machine(capsys):
    assert status("doctor") == 0
    out = capsys.readouterr().out
    for subject in ("core ", "kernels ", "notebook ", "gpu ", "records ", "configs ", "peer "):
        assert f"\n{subject}" in out
    assert out.endswith("ready: dsv4lab run\n")


def test_doctor_sees_a_torch_without_cuda_beside_a_driver(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(doctor, "_installed", lambda name: "2.13.0+cpu")
    finding = doctor._gpu(None)
    assert "2.13.0+cpu sees none, though nvidia-smi is here" in finding.text
    assert finding.fix


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["sparse_mla", "--quick"], "quick is no option of sparse_mla, which takes cases, impls, peers, sweep"),
        (["allreduce", "--peers"], "peers is no option of allreduce, which takes cases, impls, ranks, quick"),
        (["bf16_drift", "--case", "b1"], "cases is no option of bf16_drift"),
        (["capture", "--ranks", "2"], "ranks is no option of capture, which takes impls, jobs, timeout_s"),
        (["capture", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["sparse_mlb"], "stem 'sparse_mlb' is no kernel module with cases; known: "),
        (["allreduce", "--ranks", "1"], "ranks must be at least 2"),
        (["allreduce", "--case", "3KiB"], "cases has no '3KiB'"),
    ],
)
def test_experiments_and_kernels_have_options_of_their_own(monkeypatch, capsys, tmp_path, args, complaint):
    monkeypatch.setattr(hardware, "probe", lambda: H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(timing, "require_gpu", lambda device="cuda": torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert status("measure", *args, "--out", str(tmp_path)) == 2
    assert complaint in capsys.readouterr().err


def test_every_experiment_is_there_and_says_where_its_records_go():
    for experiment in (*experiments.EXPERIMENTS.values(), experiments.KERNEL_MODULE):
        assert "directory" in signature(resolve_name(experiment.function)).parameters
    assert not set(experiments.EXPERIMENTS) & {module.name for module in iter_modules(kernels.__path__)}


def test_capture_needs_a_gpu_and_the_bf16_study_does_not(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hardware, "probe", lambda: None)
    monkeypatch.setattr(flip, "SMALL", flip.Size((600,), 1, 256, 1, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for stem in ("c4_layer", "capture", "capture_gain"):
        assert status("measure", stem) == 2
        assert f"{stem} needs a CUDA GPU" in capsys.readouterr().err
    assert status("measure", "bf16_selection", "--case", "random_n600", "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"recorded: {next(tmp_path.iterdir())}\n"
