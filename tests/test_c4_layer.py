"""One c4 layer's indexer and attention in sequence: the attention reads what the indexer chose, and gaps are told."""

import pytest
import torch

from dsv4lab import c4_layer, hardware, records
from dsv4lab.kernels import indexer
from dsv4lab.verdict import CheckFailed

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CASE = indexer.Case("test", 1, 640, 600)


def test_the_attention_reads_the_slots_that_the_indexer_chose():
    first, second = c4_layer.layers(CASE, device=DEVICE, sets=2)
    before = first.attention().clone()
    assert (first.slots == -1).all() and first.heads.extra_indices_in_kvcache.data_ptr() == first.slots.data_ptr()
    assert c4_layer.check(first).passed
    assert (first.slots >= 0).any() and not torch.equal(first.attention(), before)
    assert (second.slots == -1).all()


def test_a_wrong_selection_or_attention_is_no_measurement(monkeypatch):
    (layer,) = c4_layer.layers(CASE, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(c4_layer.Layer, "indexer", lambda self: self.slots.fill_(0))
        with pytest.raises(CheckFailed, match="the selection has error"):
            c4_layer.check(layer)
    attention = c4_layer.Layer.attention
    monkeypatch.setattr(c4_layer.Layer, "attention", lambda self: attention(self) * 1.5)
    with pytest.raises(CheckFailed, match="the attention has error"):
        c4_layer.check(layer)


def test_work_of_the_layer_is_that_of_its_parts():
    parts = [c4_layer._work(CASE, part) for part in c4_layer.PARTS]
    assert parts[2].bytes == parts[0].bytes + parts[1].bytes and parts[2].flops == parts[0].flops + parts[1].flops


def test_an_unknown_case_is_named():
    with pytest.raises(ValueError, match=r"cases must be of .*, got 'huge'"):
        c4_layer.run(["huge"])


@pytest.mark.gpu
def test_a_run_records_every_part_with_its_gaps(tmp_path):
    path = c4_layer.run(["b32_max2048_len128"], directory=tmp_path, budget_s=0.1)
    found = {record.impl: record for record in records.read(c4_layer.EXPERIMENT, tmp_path)}
    assert path.exists() and set(found) == set(c4_layer.PARTS)
    told = {part: record.result for part, record in found.items()}
    assert told["layer"]["launches"] == told["indexer"]["launches"] + told["attention"]["launches"] >= 3
    for each in told.values():
        assert 0 < each["busy_us"] <= each["span_us"] and 0 <= each["idle_share"] < 1
