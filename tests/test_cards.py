"""The cards of sm_120 beside Hopper's: nothing is worse without a reason, and a prediction is what it says."""

import json

import pandas as pd
import pytest

from dsv4lab import cards, cli, records, roofline
from dsv4lab.hardware import lookup

H200, RTX = lookup("H200"), lookup("RTX PRO 6000 Blackwell")


@pytest.mark.parametrize("stem", cards.SHIPPED)
def test_nothing_shipped_is_worse_than_its_hopper_sibling_without_a_reason(stem):
    table = cards.worse(stem)
    assert table[table["reason"] == ""].empty


def test_no_reason_outlives_what_it_explains():
    for (stem, kernel), reasons in cards.REASONS.items():
        table = cards.worse(stem)
        assert reasons.keys() <= set(table[table["kernel"] == kernel]["property"])


@pytest.mark.parametrize("stem", cards.SHIPPED)
def test_every_shipped_kernel_has_a_sibling(stem):
    table = cards.compared(stem)
    assert table.xs("config", axis=1).notna().all(axis=None) and len(table)


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Where attention is worse with some values of its card for many rows replaced."""

    def change(**of_sm_120) -> pd.DataFrame:
        content = {"cards": cards.read("sparse_mla")}
        entries = content["cards"]["sm_120"]
        entry = next(name for name in entries if name.startswith("H any, rows any"))
        entries[entry]["split_k_kernel"] |= of_sm_120
        path = tmp_path / "sparse_mla.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        monkeypatch.setattr(cards, "path", lambda stem: path)
        table = cards.worse("sparse_mla")
        return table[(table["used for"] == "H any, rows any") & (table["kernel"] == "split_k_kernel")].set_index(
            "property"
        )

    return change


@pytest.mark.parametrize(
    ("name", "value"), [("spill_bytes", 64), ("bytes_per_key", 2336), ("mma_per_key", 64.0), ("shared_bytes", 103_000)]
)
def test_what_has_become_worse_has_no_reason(changed, name, value):
    assert changed(**{name: value}).loc[name, "reason"] == ""


def test_the_sm_explains_blocks_alone_that_its_shared_memory_keeps_out(changed):
    assert "100 KiB" in changed()["reason"]["occupancy"]
    assert changed(shared_bytes=1024, registers=256 * 2)["reason"]["occupancy"] == ""  # now by registers


def test_more_registers_are_excused_where_they_keep_no_block_out(changed):
    assert "no more blocks" in changed(shared_bytes=60_000, registers=256)["reason"]["registers"]
    assert changed(shared_bytes=1024, registers=256 * 2)["reason"]["registers"] == ""


def test_attention_has_the_mma_instructions_that_its_products_need():
    table = cards.compared("sparse_mla").xs("split_k_kernel", level="kernel")["mma_per_key", "sm_120"]
    for use, heads in (("H <= 16, rows any", 16), ("H any, rows any", 64)):
        assert table[use] == 2 * heads * 512 / (16 * 8 * 16)


def test_logits_multiply_as_much_with_wgmma_as_with_mma_sync():
    table = cards.compared("mqa_logits")["mma_per_key"]
    assert (table["sm_120"] == table["sm_90"]).all()
    assert table["sm_90"].loc["next_n 1, B > 64"].item() == 64 * 128 / (16 * 8 * 16)


def test_a_prediction_keeps_the_share_that_the_newest_record_reached():
    table = cards.predicted("sparse_mla")
    row = table.loc[("b128_h64", "cold")]
    runs = [r for r in records.read("sparse_mla_decode") if r.impl == "split_k" and r.case == "b128_h64"]
    record = [r for r in runs if r.config["cache"] == "cold"][-1]
    ratio = roofline.floor_s(record.work, RTX) / roofline.floor_s(record.work, H200)
    assert row["H200"] == record.median_us
    assert row["predicted, sm_120"] == pytest.approx(ratio * record.median_us)
    assert row["config"] == "h32_n32_w4_s1_kq_x1" and table["share"].between(0, 1).all()


def test_a_prediction_takes_no_warm_call_no_other_gpu_and_no_config_that_is_not_shipped():
    call = next(r for r in records.read("norm_rope") if r.impl == "triton")
    other_gpu = call.model_copy(update={"env": call.env.model_copy(update={"gpu": "NVIDIA H100 80GB HBM3"})})
    others = [
        call.model_copy(update={"config": call.config | change}) for change in ({"cache": "warm"}, {"variant": "w9"})
    ]
    assert list(cards.predicted("norm_rope", [call]).index) == [(call.case, call.config["cache"])]
    assert cards.predicted("norm_rope", [other_gpu, *others]).empty


@pytest.mark.parametrize("stem", cards.SHIPPED)
def test_every_stem_has_a_prediction(stem):
    assert len(cards.predicted(stem))


def test_the_command_prints_the_tables_and_refuses_other_stems(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["cards", "norm_rope"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "predicted and not measured" in out and "36 (32)" in out
    with pytest.raises(SystemExit) as caught:
        cli.main(["cards", "nope"])
    assert caught.value.code == 2 and "stem must be one of sparse_mla" in capsys.readouterr().err


def test_the_newest_cards_count_and_older_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(cards.records, "root", lambda: tmp_path)
    folder = tmp_path / "static"
    folder.mkdir()
    with pytest.raises(ValueError, match="stem 'topk' has no cards in records/static"):
        cards.path("topk")
    for name in ("topk", "topk_20261129T185700Z", "topk_20261130T000000Z", "topk_more_20271130T000000Z"):
        (folder / f"{name}.json").touch()
    assert cards.path("topk").name == "topk_20261130T000000Z.json"
