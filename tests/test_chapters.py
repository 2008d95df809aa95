"""What the chapters share around their figures, and that their README says what they answer."""

import re
from itertools import chain

import nbformat
import pandas as pd
import pytest
from test_plot import _record
from test_repository import NOTEBOOKS, ROOT

from dsv4lab import hardware, records
from dsv4lab.plot import chapters, serving
from dsv4lab.roofline import Work


def test_a_run_is_one_file_whatever_lies_beside_it():
    (newest, *_) = sorted({record.file for record in records.read("sparse_mla_decode")}, reverse=True)
    assert {record.file for record in chapters.read_run("sparse_mla_decode", newest)} == {newest}
    with pytest.raises(ValueError, match=f"file 'x' is no run of sparse_mla_decode; there are .*{newest}"):
        chapters.read_run("sparse_mla_decode", "x")


def test_provenance_names_the_file_the_gpu_and_the_rivals():
    run = [
        _record("b1_h64", "split_k", 10.0, Work(1.0, 1.0), B=1),
        _record("b1_h64", "flashmla", 12.5, Work(1.0, 1.0), B=1, package="flash 1.0"),
    ]
    run = [
        record.model_copy(update={"kernel_sha256": "ab" * 32, "check": {"error": 1.0, "tolerance": 4.0}})
        for record in run
    ]
    table = chapters.provenance(run)
    assert list(table) == ["sparse_mla_decode"]
    expected = {"record file": run[0].file, "GPU": "NVIDIA H200", "rivals": "flash 1.0", "commit": "not committed then"}
    assert table.loc[list(expected), "sparse_mla_decode"].to_dict() == expected
    assert table.loc["largest error / its tolerance"].item() == "0.250"
    exact = [record.model_copy(update={"check": {"error": 0.0, "tolerance": 0.0}}) for record in run]
    assert chapters.provenance(exact).loc["largest error / its tolerance"].item() == "0"
    rival = [record.model_copy(update={"kernel_sha256": None}) for record in run]
    both = chapters.provenance(run, rival)
    assert both.loc["kernel source (sha256)"].tolist() == ["ab" * 6, "none of ours"]
    assert list(both) == 2 * ["sparse_mla_decode"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0858, "0.0858"),
        (9.078, "9.08"),
        (56.82, "56.8"),
        (299.6, "300"),
        (15377.2, "15,377"),
        (0.0, "0"),
        (None, "–"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert chapters.number(value) == text


def test_a_shown_table_is_text_under_the_labels_of_the_palette():
    table = pd.DataFrame({"split_k": [9.078], "B": [1]}).rename_axis(columns="impl")
    assert chapters.shown(table).to_dict("list") == {"split-K": ["9.08"], "B": [1]}
    assert chapters.shown(table).columns.name is None
    assert list(chapters.shown(pd.concat({"cold": table}, axis=1))) == [("cold", "split-K"), ("cold", "B")]


def test_claims_carry_their_limit_and_their_worst_case():
    values = pd.Series({1: 0.66, 128: 1.69, 4: None}).rename_axis("B")
    assert chapters.at_most("at most {} times", values, 1.9) == [("at most 1.9 times", True, "1.69 at B = 128")]
    assert chapters.at_most("at most {} times", values, 1.0) == [("at most 1.0 times", False, "1.69 at B = 128")]
    assert chapters.at_least("at least {} times", values, 0.7) == [("at least 0.7 times", False, "0.660 at B = 1")]
    assert chapters.at_most("{}", values.loc[[4]], 1.0) == []
    nested = pd.concat({64: values}, names=["H"])
    assert chapters.at_most("{}", nested, 2)[0][2] == "1.69 at H = 64, B = 128"
    assert [chapters.span(values), chapters.span(values.loc[[1]])] == ["0.660 to 1.69", "0.660"]


def test_a_table_of_compiled_kernels_shows_the_first_of_each_entry():
    card = {"shared_bytes": 50_688, "registers": 128, "spill_bytes": 0, "mma": 8, "load128": 4, "load_narrow": 2}
    card["warps"] = 4
    cards = {"H any, rows any: h16": {"split_k_kernel": card, "combine_kernel": card | {"registers": 1}}}
    table = chapters.compiled(cards, hardware.lookup("RTX PRO 6000 Blackwell"))
    row = table.loc["H any, rows any"]
    assert (row["config"], row["registers"], row["of the limit"], row["blocks an SM holds"]) == ("h16", 128, "50%", 1)


def test_the_readme_of_the_chapters_gives_the_answer_of_each():
    readme = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\) \| (.+?) \| (.+?) \| .+ \|$", readme, re.MULTILINE)
    assert [name for name, _, _ in rows] == [path.stem for path in NOTEBOOKS]
    for path, (_, question, answer) in zip(NOTEBOOKS, rows, strict=True):
        text = str(nbformat.read(path, as_version=4))
        assert question in text
        assert f"**Answer.** {answer}" in text


@pytest.mark.parametrize("heads", [64, 8])
def test_the_headline_of_the_readme_is_what_the_records_say(heads):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    run, with_stock, *_ = _named_runs(text, "sparse_mla_decode")
    assert chapters.headline(run, with_stock, heads) in text


def test_so_is_its_table_of_the_indexer():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (run,) = _named_runs(text, "indexer")
    assert chapters.indexer_headline(run) in text


def test_so_is_its_table_of_the_server():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    runs = [chapters.read_run("serving", file) for file in _named_files(text, "serving")]
    started = serving.by_start(list(chain(*runs)), ("indexer", "native"))
    assert serving.headline(serving.middle(serving.served(records.to_frame(runs[0])), started)) in text


def _named_files(text: str, experiment: str) -> list[str]:
    """The runs of an experiment that a text names as its sources, in its order."""
    return re.findall(rf"`records/({experiment}_h200_\w+\.jsonl)`", text)


def _named_runs(text: str, experiment: str) -> list[pd.DataFrame]:
    files = _named_files(text, experiment)
    return [records.to_frame(chapters.read_run(experiment, file)) for file in files]
