"""Whether our kernels answer as SGLang's own do: logprobs of the first decode step, by the server's own account.

Two servers of the small model with random weights (`weights`) get the same prompts: `native` in batches of 16, of 4 and
one by one, which tells how far its answers depend on who else is in the batch, and `indexer` in batches of 16.
The first token of an answer comes from prefill, the second is the first that decode makes. It is compared after the
same first token, the one that `native` chose in its first run: the other runs are given a bias of 4 for it, which
frequency and presence penalty take back exactly once it has been said (they need SGLang to have seen it by then:
no overlapped scheduling). The logits are computed in fp32, or all would be rounded to bf16 before they are compared.

With tp > 1 the question is whether `indexer` on that many GPUs answers as on one. The yardstick is again SGLang's own
path: how far `native` on as many GPUs, all in batches of 16, is from `native` on one.

    out/parity/<run>.jsonl     the answers of a run, one a line, there as soon as their batch is
    out/runs/parity_<server>/  log and receipts of its server
    out/records/               serving_parity or serving_parity_tp: one record a context, one over all

What is there is not asked again.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from dsv4lab.files import locked, write_atomically
from dsv4lab.records import Record
from dsv4lab.serving import campaign, http, launch, load, server_record, synthetic
from dsv4lab.serving.answers import ALLOWED, REFERENCE, Answer, Run, comparison, judge
from dsv4lab.serving.launch import ServeError, Server
from dsv4lab.serving.stages import LEAST_S, Plan

EXPERIMENT, SHARED = "serving_parity", "serving_parity_tp"
CONTEXTS = {100: 192, 3_000: 48, 40_000: 16}
"""Tokens of a prompt -> prompts of that length."""

TOP = 20
"""So many of the most likely tokens at the reference's second step are compared."""

FLAGS = ("--disable-overlap-schedule", "--enable-fp32-lm-head", "--cuda-graph-max-bs", "16")
_FORCED = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
_CALL_S = 300.0


def prompt(context: int, number: int) -> list[int]:
    """Token ids; the same in every run."""
    rng = random.Random(f"{context}/{number}")
    return [rng.randint(load.FIRST_ID, load.LAST_ID) for _ in range(context)]


def config(plan: Plan, each: Run) -> launch.Config:
    """The server of a run, on random weights."""
    of_stage = plan.config(each.stage)
    return replace(
        of_stage,
        setting=replace(of_stage.hooks, weights="random"),
        tp=each.tp,
        flags=(*plan.flags, *FLAGS),
        run=plan.out / "runs" / f"parity_{each.server}",
    )


def run(plan: Plan, say: Callable[[str], None] = print) -> bool:
    """Asks what has no answer yet, compares and records; whether `indexer` keeps to the bounds on every prompt.

    ValueError if the folder has answers of another model, or another process asks for it.
    """
    begun, _ = time.monotonic(), plan.deadline
    tell = lambda text: say(f"[{time.monotonic() - begun:6.0f} s] parity: {text}")  # noqa: E731
    (plan.out / "parity").mkdir(parents=True, exist_ok=True)
    _check_alike(plan)
    synthetic.write(plan.out / "model")
    with locked(plan.out / "parity" / "lock", wait_s=0) as alone:
        if not alone:
            raise ValueError(f"another process asks for parity in {plan.out.name}")
        for server, runs in _servers(plan).items():
            if not any(_missing(plan, each, context) for each in runs for context in CONTEXTS):
                tell(f"{server}: nothing left to ask")
                continue
            try:
                _serve(plan, server, runs, tell)
            except (ServeError, http.NoAnswer, ValueError, OSError) as error:
                tell(f"{server} failed: {error}")
    lines = list(compare(plan))
    if lines:
        tell(f"recorded: {campaign.store(lines, _experiment(plan), plan.out / 'records')}")
    for line in lines:
        found = ", ".join(f"{name} {value:.4g}" for name, value in line.result.items() if value is not None)
        tell(f"{line.case}: {'kept' if line.check['passed'] else 'NOT KEPT'}: {found}")
    return bool(lines) and lines[-1].check["passed"]


def describe(plan: Plan) -> Iterator[str]:
    """The environment and the command line of each server, and what it is asked."""
    for server, runs in _servers(plan).items():
        yield f"parity_{server}: {config(plan, runs[0]).command_line}"
        for each in runs:
            asked = ", ".join(f"{count} of {context} tokens" for context, count in CONTEXTS.items())
            yield f"  {each.name}: prompts in batches of {each.batch}: {asked}"


def _experiment(plan: Plan) -> str:
    return EXPERIMENT if plan.tp == 1 else SHARED


def _servers(plan: Plan) -> dict[str, list[Run]]:
    """The runs of each server, in the order in which they are started."""
    found: dict[str, list[Run]] = {}
    for each in comparison(plan.tp).runs:
        found.setdefault(each.server, []).append(each)
    return found


def _serve(plan: Plan, name: str, runs: list[Run], tell: Callable[[str], None]) -> None:
    if plan.left < LEAST_S:
        return tell(f"{name} not begun, the time is over")
    with Server(config(plan, runs[0]), tell) as server:
        info = {"info": server_record.account(server.info), "hooks": str(server.config.hooks)}
        write_atomically(_server_file(plan, name), json.dumps(info))
        for context in CONTEXTS:
            for each in runs:
                _ask(plan, each, context, server.url, tell)


def _ask(plan: Plan, each: Run, context: int, url: str, tell: Callable[[str], None]) -> None:
    """Every prompt of a context that has no answer in this run. NoAnswer if the server is gone."""
    missing, answered, errors = _missing(plan, each, context), 0, []
    for start in range(0, len(missing), each.batch):
        if plan.left < 1:
            break
        numbers = missing[start : start + each.batch]
        try:
            new = _batch(plan, each, context, numbers, url)
        except (http.NoAnswer, LookupError, TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            if not http.healthy(url):
                raise http.NoAnswer(errors[-1]) from None
            continue
        answered += len(new)
        kept = [*_read(plan, each).values(), *new]
        write_atomically(_file(plan, each), "".join(json.dumps(asdict(answer)) + "\n" for answer in kept))
    failed = f" (first error: {errors[0]})" if errors else ""
    if missing:
        tell(f"{each.name}: {answered} of {len(missing)} prompts of {context} tokens answered{failed}")


def _batch(plan: Plan, each: Run, context: int, numbers: list[int], url: str) -> list[Answer]:
    """One call. LookupError, TypeError or ValueError where the answer lacks what was asked for."""
    reference = None if each == REFERENCE else [_read(plan, REFERENCE)[context, number] for number in numbers]
    sampling = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
    body = {
        "input_ids": [prompt(context, number) for number in numbers],
        "sampling_params": [sampling] * len(numbers),
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    if reference:
        body["sampling_params"] = [sampling | _FORCED | {"logit_bias": {str(r.first): 4.0}} for r in reference]
        body["token_ids_logprob"] = [[int(token) for token in r.logprobs] for r in reference]
    begun = time.monotonic()
    replies = http.call(url, "/generate", body, timeout=min(plan.left, _CALL_S))
    seconds = (time.monotonic() - begun) / len(numbers)
    field = "output_token_ids_logprobs" if reference else "output_top_logprobs"
    answers = []
    for number, reply in zip(numbers, replies, strict=True):
        about = reply["meta_info"]
        (_, first, *_), (_, second, *_) = about["output_token_logprobs"]
        logprobs = {str(token): math.nan if value is None else value for value, token, *_ in about[field][1]}
        answers.append(Answer(context, number, first, second, logprobs, seconds))
    return answers


def _missing(plan: Plan, each: Run, context: int) -> list[int]:
    """Prompts without an answer; of a run that follows the reference, of those it can follow."""
    had, known = _read(plan, each), _read(plan, REFERENCE)
    numbers = [number for number in range(CONTEXTS[context]) if (context, number) not in had]
    return [number for number in numbers if each == REFERENCE or (context, number) in known]


def _check_alike(plan: Plan) -> None:
    for server in _servers(plan):
        if (path := _server_file(plan, server)).is_file():
            info = json.loads(path.read_text(encoding="utf-8"))["info"]
            for name, had in (("layers", server_record.layers(info)), ("context_length", info.get("context_length"))):
                if had not in (None, wanted := getattr(plan, name)):
                    raise ValueError(
                        f"{name} is {wanted}, and {plan.out.name} has answers with {had}: take another out"
                    )


def _server_file(plan: Plan, server: str) -> Path:
    return plan.out / "parity" / f"{server}.server.json"


def _file(plan: Plan, each: Run) -> Path:
    return plan.out / "parity" / f"{each.name}.jsonl"


def _read(plan: Plan, each: Run) -> dict[tuple[int, int], Answer]:
    path = _file(plan, each)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {answer.key: answer for answer in (Answer(**json.loads(line)) for line in lines)}


def compare(plan: Plan) -> Iterator[Record]:
    """A record for each context, and the last over all: none without answers from every run."""
    pairs = comparison(plan.tp)
    for case, contexts in [*((f"ctx{context}", [context]) for context in CONTEXTS), ("all", list(CONTEXTS))]:
        runs = [
            {key: answer for key, answer in _read(plan, each).items() if answer.context in contexts}
            for each in (REFERENCE, *pairs.again, pairs.base, pairs.ours)
        ]
        keys = sorted(set.intersection(*map(set, runs)))
        if keys:
            expected = sum(CONTEXTS[context] for context in contexts)
            yield _record(plan, case, contexts, [[run[key] for key in keys] for run in runs], expected)


def _record(plan: Plan, case: str, contexts: list[int], answers: list[list[Answer]], expected: int) -> Record:
    """Of the answers of the reference, and of the runs of a comparison, to the same prompts."""
    judged, pairs = judge(answers, expected), comparison(plan.tp)
    return server_record.line(
        case,
        {"stage": pairs.ours.stage, "against": pairs.base.stage, "C": REFERENCE.batch,
         "C_again": [each.batch for each in pairs.again], "contexts": contexts,
         "context_length": plan.context_length, "layers": plan.layers, "tp": plan.tp},
        experiment=_experiment(plan),
        method={"name": "logprobs at the first decode step, after the reference's first token",
                "tokens": TOP, "allowed": ALLOWED},
        samples_us=[1e6 * sum(answer.seconds for answer in run) for run in (*answers[:-2], answers[-1])],
        check=judged.check,
        server={name: json.loads(_server_file(plan, name).read_text(encoding="utf-8")) for name in _servers(plan)},
        result=judged.result,
    )  # fmt: skip
