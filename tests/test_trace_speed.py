import sys

import pytest

from dsv4lab import records, trace, trace_speed
from dsv4lab.trace import summary


@pytest.fixture
def rival(tmp_path):
    """A Python whose HolisticTraceAnalysis answers from the file alone, and is off by a thousandth."""
    site = tmp_path / "site"
    for package in ("hta/common", "hta/configs", "HolisticTraceAnalysis-0.0.1.dist-info"):
        (site / package).mkdir(parents=True)
    (site / "HolisticTraceAnalysis-0.0.1.dist-info" / "METADATA").write_text(
        "Name: HolisticTraceAnalysis\nVersion: 0.0.1\n"
    )
    (site / "hta/common/trace_parser.py").write_text("def set_default_trace_parsing_backend(backend): pass\n")
    (site / "hta/configs/parser_config.py").write_text("ParserBackend = {'JSON': 1, 'IJSON_BATCH_AND_COMPRESS': 2}\n")
    (site / "hta/trace_analysis.py").write_text(
        "import json\nimport pandas as pd\n\n\nclass TraceAnalysis:\n"
        "    def __init__(self, trace_files, trace_dir, include_last_profiler_step):\n"
        "        self.events = json.load(open(trace_files[0]))['traceEvents']\n"
        "    def get_gpu_kernel_breakdown(self, visualize):\n"
        "        total = sum(e['dur'] for e in self.events if e.get('cat') == 'kernel')\n"
        "        return pd.DataFrame({'sum': [1.001 * total]}), None\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def test_the_synthetic_trace_is_always_the_same_and_is_read_exactly(tmp_path):
    us = [trace_speed.synthetic(tmp_path / f"{n}.json", 1000) for n in (1, 2)]
    assert us[0] == us[1]
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    taken = trace.read(tmp_path / "1.json")
    (device,) = summary.by_device(taken).itertuples()
    assert (device.kernels, device.kernel_ns / 1000) == (1000, us[0])
    assert (taken.events["launch_ts"] > 0).all() and taken.lost == {}


def test_both_programs_are_measured_and_recorded(tmp_path, rival, capsys):
    trace_speed.main(rival, kernels=900, runs=1, out=tmp_path / "records")
    found = {record.impl: record for record in records.read("trace_speed", tmp_path / "records")}
    assert list(found) == ["dsv4lab", "hta_json", "hta_ijson_batch_and_compress"]
    ours, theirs = found["dsv4lab"], found["hta_json"]
    assert ours.check["error"] == 0 and theirs.check["error"] == pytest.approx(0.001)
    assert (len(ours.samples_us), len(theirs.samples_us)) == (2, 1)  # ours before each of theirs
    assert theirs.config["package"] == "HolisticTraceAnalysis==0.0.1"
    assert ours.config["kernels"] == 900 and ours.work.bytes == ours.config["file_bytes"]
    assert ours.result["peak_mib"] > 0 and ours.result["cpu_s"] > 0
    assert "recorded: " in capsys.readouterr().out


def test_a_program_that_fails_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)python.* failed: .*ZeroDivisionError"):
        trace_speed.timed([sys.executable, "-c", "1 / 0"], tmp_path)
