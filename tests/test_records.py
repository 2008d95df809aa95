"""Records on their way in and out, what they refuse, and the reported numbers beside them."""

import gzip
import json
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from pydantic import ValidationError

from dsv4lab import records
from dsv4lab.records import Record
from dsv4lab.roofline import Work

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def fields(**changes):
    env = {
        "gpu": "NVIDIA H200",
        "gpu_count": 1,
        "capability": (9, 0),
        "driver": "580.1",
        "cuda": "13.0",
        "python": "3.12.3",
        "torch": "2.11.0",
        "triton": "3.6.0",
    }
    return {
        "experiment": "sparse_mla_decode",
        "case": "b4_h64",
        "impl": "split_k",
        "config": {"B": 4, "H": 64, "cache": "cold"},
        "method": {"clock": "graph replay"},
        "samples_us": [float(us) for us in range(1, 12)],
        "check": {"error": 2e-3, "baseline_error": 2e-3, "tolerance": 4.1e-3, "passed": True},
        "work": Work(flops=1e9, bytes=1e6),
        "seed": 0,
        "argv": ["dsv4lab", "measure", "sparse_mla"],
        "date_utc": NOON,
        "git": {"commit": "0" * 40, "dirty": False},
        "kernel_sha256": "a" * 64,
        "env": env | changes.pop("env", {}),
        "clocks": {"before": {"sm_mhz": 1980}, "after": None},
    } | changes


def record(**changes):
    return Record(**fields(**changes))


@pytest.fixture
def clock(monkeypatch):
    """The time that file names are made of, one minute on at each look."""

    class Clock(datetime):
        minute = 0

        @classmethod
        def now(cls, tz):
            cls.minute += 1
            return NOON.astimezone(tz) + timedelta(minutes=cls.minute)

    monkeypatch.setattr(records, "datetime", Clock)
    return Clock


def test_what_is_written_is_read_back(tmp_path, clock):
    run = [record(), record(impl="simt", config={"B": 4, "note": None, "list": [1, 2]}, seed=1)]
    path = records.write(run, "sparse_mla_decode", tmp_path / "new")
    assert path.name == "sparse_mla_decode_h200_20261129T120100Z.jsonl"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing else is left lying about
    assert records.read("sparse_mla_decode", path.parent) == [r.model_copy(update={"file": path.name}) for r in run]
    line = json.loads(path.read_text().splitlines()[0])
    assert line["schema"] == 1 and line["work"] == {"flops": 1e9, "bytes": 1e6}
    assert line["date_utc"] == "2026-11-29T12:00:00Z" and "file" not in line


def test_times_are_kept_in_utc():
    east = datetime(2026, 11, 29, 14, tzinfo=timezone(timedelta(hours=2)))
    assert record(date_utc=east).model_dump(mode="json")["date_utc"] == "2026-11-29T12:00:00Z"


def test_write_never_overwrites(tmp_path, monkeypatch, clock):
    path = records.write([record()], "sparse_mla_decode", tmp_path)
    before = path.read_bytes()
    clock.minute = 0
    with pytest.raises(FileExistsError, match=f"{path.name} exists already"):
        records.write([record(seed=9)], "sparse_mla_decode", tmp_path)
    assert path.read_bytes() == before


def test_write_leaves_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.write([record()], "sparse_mla_decode", tmp_path)
    with pytest.raises(FileNotFoundError, match="no records of experiment 'sparse_mla_decode'"):
        records.read("sparse_mla_decode", tmp_path)


def test_write_keeps_one_experiment_and_one_gpu_in_a_file(tmp_path):
    for run, message in (
        ([], "records is empty"),
        ([record(), record(experiment="other")], r"experiment 'sparse_mla_decode', got \['other'\]"),
        ([record(), record(env={"gpu": "NVIDIA L40S"})], r"of one GPU, got \['h200', 'l40s'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            records.write(run, "sparse_mla_decode", tmp_path)
    assert not list(tmp_path.iterdir())


def test_read_keeps_to_its_experiment(tmp_path, clock):
    records.write([record(experiment="sparse_mla")], "sparse_mla", tmp_path)
    records.write([record(experiment="sparse_mla_decode")], "sparse_mla_decode", tmp_path)
    assert [r.experiment for r in records.read("sparse_mla", tmp_path)] == ["sparse_mla"]


@pytest.mark.parametrize(
    ("break_line", "message"),
    [
        (lambda line: line[: len(line) // 2], r"line 2: record: Invalid JSON"),
        (lambda line: line.replace('"seed":0', '"seed":"x"'), r"line 2: seed: .*valid integer"),
        (lambda line: line.replace('"seed":0', '"seed":0,"sede":0'), r"line 2: sede: Extra inputs"),
        (lambda line: line.replace('"seed":0,', ""), r"line 2: seed: Field required"),
        (lambda line: line.replace('"schema":1', '"schema":2'), r"line 2: schema: Input should be 1"),
        (lambda line: line.replace("[1.0,", "[-1.0,"), r"line 2: samples_us\.0: .*greater than 0"),
        (lambda line: line.replace("[1.0,", "[NaN,"), r"line 2: samples_us\.0: .*(finite|greater)"),
        (lambda line: line.replace('"driver":"580.1"', '"driver":7'), r"line 2: env\.driver: "),
        (lambda line: line.replace('"sparse_mla_decode"', '"other"'), r"line 2: experiment is 'other'"),
        (lambda line: "", r"line 2: record: "),
    ],
)
def test_a_broken_line_is_named_by_file_line_and_field(tmp_path, clock, break_line, message):
    path = records.write([record(), record(), record()], "sparse_mla_decode", tmp_path)
    lines = path.read_text().splitlines()
    broken = break_line(lines[1])
    assert broken != lines[1]
    path.write_text("\n".join([lines[0], broken, lines[2]]) + "\n")
    with pytest.raises(ValueError, match=f"^{path.name}, {message}"):
        records.read("sparse_mla_decode", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"check": {}}, "check"),
        ({"check": {"passed": True}}, "check.error must be a finite number, got None"),
        ({"check": {"error": 1e-3, "baseline_error": 1e-3, "tolerance": float("inf")}}, "check.tolerance"),
        ({"check": {"error": 5e-3, "baseline_error": 2e-3, "tolerance": 4e-3}}, "exceeds the tolerance"),
        ({"check": {"error": 0, "baseline_error": 0, "tolerance": 0, "passed": False}}, "must not be false"),
        ({"check": {"passed": False}}, "must not be false"),
        ({"check": {"ok": 1}, "server": {"info": {}}, "result": {}}, "result and check.passed must be given"),
        ({"check": {"passed": True}, "server": {"info": {}}}, "result and check.passed must be given"),
        ({"work": None}, "work must be given"),
        ({"work": {"flops": -1, "bytes": 0}}, "flops must be finite"),
        ({"samples_us": []}, "samples_us"),
        ({"experiment": "Sparse MLA"}, "experiment"),
        ({"date_utc": datetime(2026, 11, 29)}, "date_utc"),
        ({"kernel_sha256": "abc"}, "kernel_sha256"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"env": {"host": "x"}}, "env.host"),
    ],
)
def test_a_record_refuses(changes, message):
    with pytest.raises(ValidationError, match=message):
        record(**changes)


def test_a_serving_record_has_a_check_of_its_own():
    result = {"output_tok_s": 0.0, "ttft_ms": None}
    served = record(server={"info": {}}, check={"ok": 0, "failed": 64, "passed": False}, work=None, result=result)
    assert Record.model_validate_json(served.model_dump_json(by_alias=True)) == served


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"argv": ["/usr/bin/dsv4lab"]}, "argv"),
        ({"argv": ["dsv4lab", "--out=/home/me/x"]}, "argv"),
        ({"config": {"note": {"deep": ["see ~/notes"]}}}, "config.note.deep"),
        ({"method": {"file": "C:\\lab\\x"}}, "method.file"),
        ({"method": {"/root": 1}}, "method"),
        ({"env": {"torch": "2.11 (file:/srv/x)"}}, "torch"),
    ],
)
def test_absolute_paths_are_refused(changes, field):
    with pytest.raises(ValidationError, match=f"{field} must not hold an absolute path"):
        record(**changes)


def test_slashes_that_are_no_absolute_path_pass():
    text = "tok/s, a / b, https://example.org/x, ./records/x.jsonl, ../y, us/(call)/B, 24/7"
    assert record(method={"note": text}, argv=["dsv4lab", "notebooks/02.ipynb"]).method["note"] == text


def test_percentiles_are_of_the_raw_samples():
    r = record(samples_us=[5.0, 1.0, 3.0, 2.0, 4.0, 11.0, 10.0, 6.0, 9.0, 7.0, 8.0])
    assert (r.median_us, r.p10_us, r.p90_us) == (6.0, 2.0, 10.0)


def test_to_frame_has_a_column_for_every_config_entry(tmp_path, clock):
    records.write([record(), record(impl="simt", config={"B": 8, "block_h": 16})], "sparse_mla_decode", tmp_path)
    frame = records.to_frame(records.read("sparse_mla_decode", tmp_path))
    assert frame["B"].tolist() == [4, 8]
    assert frame["block_h"].tolist()[1] == 16 and frame["block_h"].isna()[0]
    assert frame["median_us"].tolist() == [6.0, 6.0]
    assert frame["gpu"].unique() == ["NVIDIA H200"]
    assert frame["file"].unique() == ["sparse_mla_decode_h200_20261129T120100Z.jsonl"]
    assert {"experiment", "case", "impl", "p10_us", "p90_us", "error", "flops", "bytes", "date_utc"} <= set(frame)


def test_to_frame_refuses_nothing_and_hidden_columns():
    with pytest.raises(ValueError, match="records is empty"):
        records.to_frame([])
    with pytest.raises(ValueError, match=r"config must not use the names of other columns, got \['gpu', 'impl'\]"):
        records.to_frame([record(config={"impl": "x", "gpu": 1})])


def test_select_run_takes_the_newest_file_of_each_gpu(tmp_path, clock):
    for seed, gpu in enumerate(["NVIDIA H200", "NVIDIA L40S", "NVIDIA H200", None]):
        run = [record(seed=seed, env={"gpu": gpu}, config={"seed": seed}), record(impl="simt", env={"gpu": gpu})]
        records.write(run, "sparse_mla_decode", tmp_path)
    frame = records.select_run(records.to_frame(records.read("sparse_mla_decode", tmp_path)))
    assert sorted(frame["seed"].dropna()) == [1, 2, 3]
    assert len(frame) == 6
    with pytest.raises(ValueError, match="frame must come from record files"):
        records.select_run(records.to_frame([record()]))


def test_gpu_slugs_hold_no_underscore():
    assert records.gpu_slug("NVIDIA RTX PRO 6000 Blackwell Workstation Edition") == (
        "rtx-pro-6000-blackwell-workstation-edition"
    )
    assert records.gpu_slug("NVIDIA_GB10 (x)") == "nvidia-gb10-x"
    assert records.gpu_slug(None) == "cpu"


def test_root_is_the_checkouts_or_a_clear_error(monkeypatch, tmp_path):
    assert records.root() == Path(__file__).parents[1] / "records"
    monkeypatch.setattr(records, "__file__", str(tmp_path / "site-packages" / "dsv4lab" / "records.py"))
    with pytest.raises(FileNotFoundError, match="records_dir="):
        records.root()


def test_reported_rows_are_named_once_and_marked():
    frame = records.reported()
    assert set(frame["provenance"]) == {"reported"}
    assert not frame.duplicated(["experiment", "case", "stage", "quantity", "unit"]).any()
    assert "median_us" not in frame


def test_reported_throughput():
    frame = (
        records.reported().query("quantity == 'output_throughput'").pivot(index="stage", columns="case", values="value")
    )
    assert frame.loc["baseline"].to_dict() == {"C=1": 11.5, "C=16": 26.6, "C=64": 29.7}
    assert frame.loc["mma"].to_dict() == {"C=1": 8.1, "C=16": 41.0, "C=64": 59.6}
    assert frame.loc["indexer_fix"].to_dict() == {"C=1": 58.9, "C=16": 285.1, "C=64": 531.7}


def test_reported_shares_of_the_profile_fit_together():
    frame = records.reported().query("experiment == 'decode_profile' and unit == '%'")
    shares = frame.pivot(index="stage", columns="quantity", values="value")
    assert shares.loc["indexer_fix"].sum() == 72  # what was named; the rest was not
    glue = shares.loc["split_k_bf16"]
    assert glue["glue"] == glue["glue_direct_copy"] + glue["glue_elementwise"] + glue["glue_reduce"]
    assert (shares.sum(axis=1) <= 150).all() and (shares.loc[["baseline", "mma"]].sum(axis=1) <= 100).all()


def test_every_quoted_ratio_follows_from_the_reported_rows():
    claims = records.claims()
    assert {"17.9", "10.7", "6.3"} <= set(claims["quoted"])
    assert claims["agrees"].all(), claims[~claims["agrees"]]


def test_a_claim_that_does_not_follow_or_names_no_row_is_seen(tmp_path):
    source = json.loads((records.root() / "reported" / "campaign.json").read_text())
    (tmp_path / "reported").mkdir()
    file = tmp_path / "reported" / "x.json"
    source["claims"][0]["quoted"] = "10.8"
    file.write_text(json.dumps(source))
    assert records.claims(tmp_path)["agrees"].tolist() == [False] + [True] * (len(source["claims"]) - 1)
    source["claims"][0]["numerator"].pop("case")
    file.write_text(json.dumps(source))
    with pytest.raises(ValueError, match=r"an operand must name one reported row, .* names 3"):
        records.claims(tmp_path)
    source["rows"][0]["value"] = "fast"
    file.write_text(json.dumps(source))
    with pytest.raises(ValueError, match=r"^x.json: rows\.0\.value: "):
        records.reported(tmp_path)


NOT_FOR_PUBLIC = {
    "absolute path": re.compile(
        r"(?<![\w./])/(home|root|work|Users|tmp|usr|opt|mnt|data|workspace|content)\b|[A-Za-z]:\\\\"
    ),
    "user at host": re.compile(r"[\w.-]+@[\w-]+"),
    "host name": re.compile(r"\b[\w-]+\.(local|lan|internal|localdomain|cloud|cluster)\b"),
    "IP address": re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b"),
    "a named host or user": re.compile(r'"(host|hostname|node|user|username|login|home|cwd)"', re.IGNORECASE),
}


def test_committed_records_name_no_path_host_or_user():
    files = [path for path in records.root().rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        for what, pattern in NOT_FOR_PUBLIC.items():
            found = pattern.search(text)
            assert not found, f"{path.name} holds {what}: {found[0]}"


@pytest.mark.parametrize(
    "text", ['"/home/me/x"', '"C:\\\\lab"', '"me@box"', '"node7.cluster"', '"10.0.0.1"', '"hostname": 1']
)
def test_the_search_for_paths_hosts_and_users_finds_them(text):
    assert any(pattern.search(text) for pattern in NOT_FOR_PUBLIC.values())
