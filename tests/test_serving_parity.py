import json
from dataclasses import replace

import pytest

from dsv4lab import cli, records
from dsv4lab.serving import http, parity
from dsv4lab.serving.answers import AGAIN, OURS, REFERENCE, Answer, difference, judge
from dsv4lab.serving.stages import Plan

pytest_plugins = ["one_h200"]
pytestmark = pytest.mark.usefixtures("one_h200")

COUNTS = {5: 20, 9: 4}


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(parity, "CONTEXTS", COUNTS)


def walk(plan: Plan) -> tuple[bool, list[str]]:
    said: list[str] = []
    return parity.run(plan, said.append), said


def recorded(plan: Plan) -> dict[str, records.Record]:
    newest = max((plan.out / "records").glob("serving_parity_h200_*"))
    return {line.case: line for line in records.read("serving_parity", newest.parent) if line.file == newest.name}


def test_prompts_are_256_and_the_same_in_every_run(monkeypatch):
    monkeypatch.undo()
    assert sum(parity.CONTEXTS.values()) == 256 and list(parity.CONTEXTS) == [100, 3_000, 40_000]
    assert parity.prompt(100, 7) == parity.prompt(100, 7) != parity.prompt(100, 8)
    assert len(parity.prompt(3000, 0)) == 3000


def test_ours_keeps_to_the_bounds_and_is_recorded(plan):
    good, said = walk(plan)
    assert good, said
    found = recorded(plan)
    assert set(found) == {"ctx5", "ctx9", "all"}
    whole = found["all"]
    assert (whole.impl, whole.config["against"], whole.config["contexts"]) == ("indexer", "native", [5, 9])
    assert whole.result["prompts"] == 24 and whole.result["changed_decided"] == 0
    assert 0 < whole.result["noise_mean"] < whole.result["noise_max"] < 0.2
    assert whole.check["passed"] and len(whole.check["differences"]) == 24
    assert whole.config["C_again"] == [1, 4] and len(whole.check["noise"]) == 3 * 24
    assert "weights=random" in whole.server["native"]["hooks"]
    assert "attention=gluon" in whole.server["indexer"]["hooks"]
    started = json.loads((plan.out / "runs" / "parity_native" / "started.json").read_text())
    assert "--disable-overlap-schedule" in started["argv"] and started["hooks"] == "weights=random"


def test_what_was_forced_is_taken_back_before_it_is_compared(plan):
    walk(plan)
    for each in (*AGAIN, OURS):
        for key, answer in parity._read(plan, each).items():
            reference = parity._read(plan, REFERENCE)[key]
            assert answer.first == reference.first
            assert difference(reference, answer) < 0.2  # a bias of 4 left standing would be seen


@pytest.mark.parametrize(("name", "value", "had"), [("layers", 4, 6), ("context_length", 8192, 1_048_576)])
def test_answers_of_another_model_are_not_gone_on_with(plan, name, value, had):
    (plan.out / "parity").mkdir(parents=True)
    info = {"context_length": 1_048_576, "json_model_override_args": '{"num_hidden_layers": 6}'}
    (plan.out / "parity" / "native.server.json").write_text(json.dumps({"info": info}))
    with pytest.raises(ValueError, match=f"{name} is {value}, and out has answers with {had}: take another out"):
        walk(replace(plan, **{name: value}))


def test_a_drift_is_found(plan, monkeypatch):
    monkeypatch.setenv("FAKE", "drifts")
    good, said = walk(plan)
    assert not good
    errors = recorded(plan)["all"].check["errors"]
    assert any("difference_mean" in error and "exceeds 2 times the noise" in error for error in errors), said


def test_what_is_answered_is_not_asked_again(plan, monkeypatch):
    calls, call = [], http.call

    def limited(url, path, body=None, **more):
        if body and "return_logprob" in body:
            calls.append(len(body["input_ids"]))
            if len(calls) == 4:
                raise http.NoAnswer("too slow")
        return call(url, path, body, **more)

    monkeypatch.setattr(http, "call", limited)
    good, said = walk(plan)
    assert not good and any("23 of 24 prompts answered by every run" in text for text in said + errors(plan)), said
    before = len(calls)
    good, said = walk(plan)
    assert good, said
    assert calls[before:] == [1] and any("indexer: nothing left to ask" in text for text in said)


def errors(plan: Plan) -> list[str]:
    return recorded(plan)["all"].check["errors"]


def test_a_logprob_that_is_no_number_is_not_within_any_bound(plan, monkeypatch):
    call = http.call

    def broken(url, path, body=None, **more):
        replies = call(url, path, body, **more)
        if body and body.get("return_logprob") and "attention" in http.server_info(url)["hooks"]:
            replies[-1]["meta_info"]["output_token_ids_logprobs"][1][-1][0] = None  # as JSON has NaN
        return replies

    monkeypatch.setattr(http, "call", broken)
    good, said = walk(plan)
    assert not good, said
    found = recorded(plan)["all"]
    assert any("answers have a logprob that is no number" in error for error in found.check["errors"])
    assert found.result["difference_max"] is None and None in found.check["differences"]
    assert found.result["noise_max"] > 0


def test_an_answer_of_another_form_costs_its_batch_alone(plan, monkeypatch):
    calls, call = [], http.call

    def odd(url, path, body=None, **more):
        replies = call(url, path, body, **more)
        if body and body.get("return_logprob"):
            calls.append(body)
            if len(calls) == 1:
                del replies[0]["meta_info"]["output_token_logprobs"][1]
        return replies

    monkeypatch.setattr(http, "call", odd)
    _, said = walk(plan)
    assert any("native_b16: 4 of 20 prompts of 5 tokens answered (first error: ValueError" in text for text in said)


def test_a_server_that_does_not_start_leaves_what_there_is(plan, monkeypatch):
    monkeypatch.setenv("FAKE", "crash")
    good, said = walk(plan)
    assert not good and "native failed: the server ended with status 1" in said[-2]
    assert not (plan.out / "records").exists()


def test_no_server_is_started_when_the_time_is_over(plan):
    good, said = walk(replace(plan, budget_s=1.0))
    assert not good and "native not begun, the time is over" in said[0]


def test_each_bound_is_one():
    answers = [Answer(5, n, 1, n, {"1": -1.0, "2": -3.0}, 0.1) for n in range(24)]
    again = [replace(answer, logprobs={"1": -1.1, "2": -3.0}) for answer in answers]

    def complaints(ours: list[Answer], expected: int = 24, reference: list[Answer] = answers) -> list[str]:
        return judge([reference, again, reference, ours], expected).check["errors"]

    assert complaints(again) == []
    assert complaints(again, 25) == ["24 of 25 prompts answered by every run"]
    assert complaints([replace(again[0], first=2), *again[1:]]) == ["1 prompts went on after another first token"]
    far = replace(again[0], logprobs={"1": -1.3, "2": -3.0})
    assert complaints([far, *again[1:]]) == ["difference_max 0.3 exceeds 2 times the noise, 0.1"]
    assert complaints([replace(again[0], second=99), *again[1:]])[0].startswith(
        "1 tokens changed where native's margin"
    )
    same = [replace(answer, second=1) for answer in answers]
    assert "only 1 different answers to 24 prompts" in complaints([replace(a, second=1) for a in again], 24, same)[0]


def test_noise_is_of_every_two_batch_sizes_of_native():
    answers = [Answer(5, n, 1, n, {"1": -1.0, "2": -3.0}, 0.1) for n in range(24)]
    below, above = ([replace(a, logprobs={"1": p, "2": -3.0}) for a in answers] for p in (-1.1, -0.9))
    ours = [replace(below[0], logprobs={"1": -1.35, "2": -3.0}), *below[1:]]
    found = judge([answers, below, above, answers, ours], 24)
    assert found.check["passed"] and found.result["noise_max"] == pytest.approx(0.2)
    assert found.result["noise_mean"] == pytest.approx(0.4 / 3)
    assert not judge([answers, below, answers, ours], 24).check["passed"]


def test_on_two_gpus_each_path_is_compared_with_itself_on_one(plan, another_h200):
    good, said = walk(replace(plan, tp=2))
    assert good, said
    newest = max((plan.out / "records").iterdir())
    whole = {line.case: line for line in records.read("serving_parity_tp", newest.parent)}["all"]
    assert (whole.impl, whole.config["against"], whole.config["tp"]) == ("indexer", "indexer", 2)
    assert list(whole.server) == ["native", "native_tp2", "indexer", "indexer_tp2"]
    assert (whole.server["indexer"]["info"]["tp_size"], whole.server["indexer_tp2"]["info"]["tp_size"]) == (1, 2)
    assert whole.result["prompts"] == 24 and 0 < whole.result["difference_mean"]
    _, said = walk(plan)  # the servers on one GPU have answered already, but for native in smaller batches
    assert [text for text in said if "nothing left" in text and "indexer" in text], said
    assert recorded(plan)["all"].config["against"] == "native"


def test_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["parity", "--dry-run", "--out", str(tmp_path / "c")])
    assert caught.value.code == 0
    native, *_, ours, _ = capsys.readouterr().out.splitlines()
    assert native.startswith("parity_native: env ") and "DSV4LAB=weights=random" in native
    assert "sm120_path=forced,weights=random" in ours and "--enable-fp32-lm-head" in ours
    assert not (tmp_path / "c").exists()
