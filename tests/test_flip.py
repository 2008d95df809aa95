"""What the bf16 flip is measured by, on inputs small enough to know the answer."""

import pytest
import torch

from dsv4lab import flip, hardware, numerics, records

DEVICE = "cpu" if hardware.probe() is None else "cuda"


@pytest.mark.parametrize("kind", flip.KEYS)
def test_keys_are_finite_and_the_middle_road_scores_as_fp32(kind):
    query = flip.make_query(kind, 600, device=DEVICE, seed=1)
    exact, forced, middle, rounded = (
        flip.scores(query, product).double() for product in ("fp64", "fp32", "bf16_fp32_out", "bf16")
    )
    assert exact.isfinite().all() and query.keys.shape == (600, 128)
    size = exact.abs().max()
    assert (forced - exact).abs().max() < 1e-5 * size and (middle - exact).abs().max() < 1e-5 * size
    assert 1e-5 * size < (rounded - exact).abs().max() < 1e-1 * size


def test_near_ties_are_what_bf16_cannot_tell_apart():
    overlap = {}
    for kind in ("random", "near_tie"):
        query = flip.make_query(kind, 4096, device=DEVICE, seed=2)
        found, right = (flip.chosen(flip.scores(query, product)) for product in ("bf16", "fp64"))
        overlap[kind] = numerics.selection_overlap(found, right).item()
    assert overlap["near_tie"] < 0.97 < 0.99 < overlap["random"]


def test_of_equal_scores_the_first_are_chosen():
    assert flip.chosen(torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]), 4).tolist() == [3, 1, 0, 2]


def test_attention_sees_what_the_selection_missed():
    query = flip.make_query("random", 700, device=DEVICE, seed=3)
    right = flip.chosen(flip.scores(query, "fp64"))
    rest = torch.tensor(sorted(set(range(700)) - set(right.tolist())), device=DEVICE)
    swapped = right.clone()
    swapped[-20:] = rest[:20]
    far, near = (flip.attention_error(query, right, swapped, aligned=a, seed=0, heads=4) for a in (False, True))
    assert flip.attention_error(query, right, right.flip(0), aligned=False, seed=0, heads=4) < 1e-12
    assert 0 < near < far < 1


def test_streams_drift_as_bf16_streams_do_and_more_with_a_coarser_product():
    errors = flip.drift(layers=2, hidden=256, tokens=1, device=DEVICE)
    assert {len(each) for each in errors.values()} == {2}
    assert all(1e-3 < each[0] < 1e-2 for each in errors.values())
    assert errors["split_k"][-1] == pytest.approx(errors["fp32"][-1], rel=0.1)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="kind must be one of random, clustered, near_tie, got 'flat'"):
        flip.make_query("flat", 600, device=DEVICE, seed=0)
    with pytest.raises(ValueError, match="got 'fp8'"):
        flip.scores(flip.make_query("random", 600, device=DEVICE, seed=0), "fp8")


SIZE = flip.Size((600, 700), 1, 256, 1, 1)


def test_the_selection_is_recorded(tmp_path, capsys):
    path = flip.run_selection(cases=["near_tie_n600"], size=SIZE, directory=tmp_path)
    found = records.read(flip.SELECTION, tmp_path)
    assert path.name.startswith(flip.SELECTION)
    assert [(r.case, r.impl) for r in found] == [("near_tie_n600", product) for product in flip.PRODUCTS]
    assert found[0].result["overlap"] == 1 and found[0].result["worst_error_aligned"] == 0
    assert "near_tie_n600 fp32 1 " in capsys.readouterr().err
    with pytest.raises(ValueError, match="cases has no 'x'; known: random_n600, random_n700, clustered_n600"):
        flip.run_selection(cases=["x"], size=SIZE, directory=tmp_path)


def test_the_drift_is_recorded(tmp_path):
    flip.run_drift(size=SIZE, directory=tmp_path)
    found = records.read(flip.DRIFT, tmp_path)
    assert [r.impl for r in found] == list(flip.STREAM_PRODUCTS) and {r.case for r in found} == {"hidden256"}
    assert set(found[0].result) == {"layer_1"}


def test_what_was_measured_until_an_error_is_kept(tmp_path, monkeypatch):
    selection = flip.selection
    monkeypatch.setattr(flip, "selection", lambda kind, n, **kw: selection(kind, n, **kw) if n == 600 else 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        flip.run_selection(cases=["random_n600", "random_n700"], size=SIZE, directory=tmp_path)
    (partial,) = tmp_path.iterdir()
    assert str(partial) in caught.value.__notes__[0]
    assert len(partial.read_text().splitlines()) == len(flip.PRODUCTS)
