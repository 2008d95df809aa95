import subprocess
import sys
from types import ModuleType

import pytest

from dsv4lab import provenance


def _module(monkeypatch, path, name, source):
    path.write_text(source)
    module = ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "from dsv4lab.kernels._helper import thing",
        "import dsv4lab.kernels._helper",
        "from dsv4lab.kernels import _helper",
    ],
)
def test_kernel_hash_follows_the_sources_it_imports(line, monkeypatch, tmp_path):
    helper = _module(monkeypatch, tmp_path / "helper.py", "dsv4lab.kernels._helper", "thing = 1\n")
    kernel = _module(monkeypatch, tmp_path / "kernel.py", "dsv4lab.kernels._kernel", f"import os\n{line}\n")
    first = provenance.kernel_hash(kernel)
    assert provenance.kernel_hash(kernel) == first != provenance.kernel_hash(helper)
    (tmp_path / "helper.py").write_text("thing = 2\n")
    assert provenance.kernel_hash(kernel) != first


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["/opt/venv/bin/dsv4lab", "measure", "sparse_mla"], ["dsv4lab", "measure", "sparse_mla"]),
        (["x.py", "--out=/tmp/a/b", "~/c/d", "sub/dir"], ["x.py", "--out=b", "d", "sub/dir"]),
    ],
)
def test_command_line_keeps_no_absolute_path(argv, kept, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.command_line() == kept


def test_git_state_of_a_checkout(monkeypatch, tmp_path):
    package = tmp_path / "dsv4lab"
    package.mkdir()
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    assert provenance.git_state() == provenance.Git(commit=None, dirty=None)

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (package / "kernel.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = provenance.git_state()
    assert len(clean.commit) == 40 and clean.dirty is False
    (tmp_path / "notes").write_text("outside of the package")
    assert provenance.git_state() == clean
    (package / "kernel.py").write_text("2")
    assert provenance.git_state().dirty is True


def test_a_package_inside_of_someone_elses_checkout_has_no_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init"], cwd=tmp_path, check=True, capture_output=True)
    package = tmp_path / "venv" / "dsv4lab"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    assert provenance.git_state() == provenance.Git(commit=None, dirty=None)


def test_environment_names_the_versions_that_took_part():
    import torch

    environment = provenance.environment()
    assert environment.torch == torch.__version__
    assert environment.python.split(".")[0] == str(sys.version_info.major)
