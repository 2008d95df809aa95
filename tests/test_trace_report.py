import json
import re

import pytest
from traces import SGLANG, Eager, kernel, write

from dsv4lab import cli

EVIL = '<script>alert("x")</script>&'


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["profile", *map(str, args)])
    out = capsys.readouterr()
    return stopped.value.code, out.out, out.err


def test_the_report_of_our_own_trace(capsys):
    status, out, err = run(capsys, SGLANG)
    assert (status, err) == (0, "")
    assert out.startswith("kineto, NVIDIA H200, 132 SMs\n")
    assert re.search(r"0    0    1,254  15,138\.250   13,845\.825   15,152\.778  13,855\.682", out)
    assert "3 steps: busy for 4,688.893 µs and 398 events at the median" in out
    assert re.search(r"36  8,101\.959  53\.5%  8,101\.959    58\.5%  225\.054  MoE GEMM", out)
    assert "of no family: 0.1%, 1 by name" in out and "alloc_decode_kernel" in out
    assert "launch-bound" in out
    assert "an eager trace of the step has them" in out


@pytest.mark.parametrize("by", ["kernel", "op", "shape", "stream", "step"])
def test_every_cut_has_its_table(capsys, by):
    status, out, _ = run(capsys, SGLANG, "--by", by)
    assert status == 0 and f"by {by} (µs)" in out
    if by in ("op", "shape"):
        assert "graph replay, not attributable" in out


def test_two_traces_are_compared(capsys, tmp_path):
    before = Eager().run("aten::mm", 40, name="slow").run("aten::add", 10, name="same").write(tmp_path / "a.json")
    after = Eager().run("aten::mm", 5, name="fast").run("aten::add", 10, name="same").write(tmp_path / "b.json")
    status, out, _ = run(capsys, before, after, "--json", tmp_path / "out.json")
    assert status == 0
    assert re.search(r"40\.000 +0\.000 +-40\.000 .* gone +\S.* +slow", out)
    assert re.search(r"0\.000 +5\.000 +5\.000 .* new +\S.* +fast", out)
    compared = json.loads((tmp_path / "out.json").read_text())["compared"]
    assert {row["name"]: row["verdict"] for row in compared} == {"slow": "gone", "fast": "new", "same": "same"}


def test_json_has_every_table_in_nanoseconds(capsys, tmp_path):
    assert run(capsys, SGLANG, "--json", tmp_path / "out.json", "--by", "kernel")[0] == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["devices"][0]["kernel_ns"] == 15_138_250
    assert sum(row["sum_ns"] for row in found["groups"]) == 15_152_778
    assert found["suspects"][0]["rule"] == "idle_sms"
    assert found["meta"]["gpu"] == "NVIDIA H200" and found["lost"] == {}


def test_the_page_is_whole_and_escapes_what_the_trace_says(capsys, tmp_path):
    step = Eager().run(f"aten::copy_{EVIL}", 40, [[64], [64]], ["float", EVIL], name=f"kernel {EVIL}")
    path = step.write(tmp_path / f"t{EVIL.replace('/', '')}.json", deviceProperties=[{"name": EVIL, "numSms": 132}])
    for by in ("kernel", "shape"):
        assert run(capsys, path, "--html", tmp_path / "out.html", "--by", by)[0] == 0
        page = (tmp_path / "out.html").read_text()
        assert "<script" not in page and "&lt;script&gt;" in page
        assert "<svg" in page and page.rstrip().endswith("</html>")
        assert not re.search(r'(?:src|href)="(?!#)', page.replace("xlink:href", "href"))  # nothing from elsewhere


def test_a_reduced_trace_is_written_and_read(capsys, tmp_path):
    small = tmp_path / "x.trace.jsonl.gz"
    _, first, _ = run(capsys, SGLANG, "--reduce", small)
    assert run(capsys, small) == (0, first, "")


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["no.json"], 2, "No such file"),
        (["cpu.json"], 1, "no GPU kernels in cpu.json: was the profiler told to record CUDA activities?"),
        (["text.json"], 1, "text.json holds no traceEvents array"),
        (["good.json", "--rules", "text.json"], 2, "rules text.json: "),
        (["good.json", "--reduce", "x.gz"], 2, "path must end in .trace.jsonl.gz"),
        (["good.json", "--capture", "good.json"], 2, "no kernels of a graph replay"),
        (["good.json", "--json", "nowhere/out.json"], 2, "No such file"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, tmp_path, monkeypatch, args, status, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.json", [kernel("k", 1, 2)])
    write(tmp_path / "cpu.json", [])
    (tmp_path / "text.json").write_text("hello [")
    code, _, err = run(capsys, *args)
    assert (code, err.count("\n")) == (status, 1)
    assert says in err and err.startswith("dsv4lab: ")
