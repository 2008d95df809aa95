"""Whole files, locks, and text without folders."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsv4lab import files


@pytest.mark.parametrize("content", ["µs\n", b"\x00\xff"])
def test_a_file_is_replaced_whole(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text("old")
    files.write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_finished_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("--out=/home/me/x", "--out=x"),
        ("~/lab/run.py -v", "run.py -v"),
        ("'/opt/a/b'", "'b'"),
        ("a/b, 1/2", "a/b, 1/2"),
        ("see /tmp or </b>", "see tmp or <b>"),
        (r"C:\Users\me\x.py failed", "x.py failed"),
        (r'{"message": "Traceback:\n  died"}', r'{"message": "Traceback:\n  died"}'),
    ],
)
def test_folders_are_cut_from_text(text, left):
    assert files.without_folders(text) == left


def test_a_lock_is_one_process_s_until_it_ends(tmp_path):
    path = tmp_path / "new" / "x.lock"
    code = "import sys, time; from pathlib import Path; from dsv4lab.files import locked"
    code += "\nwith locked(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"mine\n"
    with files.locked(path, wait_s=0.1) as got:
        assert not got
    holder.kill()
    with files.locked(path) as got, files.locked(tmp_path / "other", wait_s=0) as another:
        assert got and another
    holder.wait()
