"""Whether our kernels answer as SGLang's own do: logprobs of the first decode step, by the server's own account.

Two servers of the small model with random weights (`weights`) get the same prompts: `native` once in batches of 16 and
once one by one, which tells how far its answers depend on who else is in the batch, and `indexer` in batches of 16.
The first token of an answer comes from prefill, the second is the first that decode makes. It is compared after the
same first token, the one that `native` chose in its first run: the other runs are given a bias of 4 for it, which
frequency and presence penalty take back exactly once it has been said (they need SGLang to have seen it by then:
no overlapped scheduling). The logits are computed in fp32, or all would be rounded to bf16 before they are compared.

    out/parity/<run>.jsonl    the answers of a run, one a line, there as soon as their batch is
    out/runs/parity_<stage>/  log and receipts of its server
    out/records/              serving_parity: one record a context, one over all

What is there is not asked again.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dsv4lab.files import write_atomically
from dsv4lab.records import Record
from dsv4lab.serving import bench, campaign, http, launch, load, synthetic
from dsv4lab.serving.launch import ServeError, Server

EXPERIMENT = "serving_parity"
CONTEXTS = {100: 192, 3_000: 48, 40_000: 16}
"""Tokens of a prompt -> prompts of that length."""

TOP = 20
"""So many of the most likely tokens at the reference's second step are compared."""

ALLOWED = 2.0
"""Times the difference of `native` to itself that `indexer` may differ from it."""

FLAGS = ("--disable-overlap-schedule", "--enable-fp32-lm-head", "--cuda-graph-max-bs", "16")
_FORCED = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
_CALL_S = 300.0


@dataclass(frozen=True)
class Run:
    """All prompts to the server of a stage, in batches of `batch`."""

    name: str
    stage: str
    batch: int


REFERENCE, AGAIN, OURS = (
    Run("native_b16", "native", 16),
    Run("native_b1", "native", 1),
    Run("indexer_b16", "indexer", 16),
)
RUNS = REFERENCE, AGAIN, OURS


@dataclass(frozen=True)
class Answer:
    """Two tokens, and at the second the logprobs of the reference's `TOP` tokens; seconds: its share of the call."""

    context: int
    prompt: int
    first: int
    second: int
    logprobs: dict[str, float]
    seconds: float

    @property
    def key(self) -> tuple[int, int]:
        return self.context, self.prompt

    @property
    def margin(self) -> float:
        """By how much a reference preferred its second token."""
        best, following = sorted(self.logprobs.values(), reverse=True)[:2]
        return best - following


def prompt(context: int, number: int) -> list[int]:
    """Token ids; the same in every run."""
    rng = random.Random(f"{context}/{number}")
    return [rng.randint(load.FIRST_ID, load.LAST_ID) for _ in range(context)]


def config(plan: campaign.Plan, stage: str) -> launch.Config:
    """The server of a stage, on random weights."""
    of_stage = plan.config(stage)
    return replace(
        of_stage,
        setting=replace(of_stage.hooks, weights="random"),
        flags=FLAGS,
        run=plan.out / "runs" / f"parity_{stage}",
    )


def run(plan: campaign.Plan, say: Callable[[str], None] = print) -> bool:
    """Asks what has no answer yet, compares and records; whether `indexer` keeps to the bounds on every prompt.

    ValueError if the folder has answers of another model.
    """
    begun, _ = time.monotonic(), plan.deadline
    tell = lambda text: say(f"[{time.monotonic() - begun:6.0f} s] parity: {text}")  # noqa: E731
    (plan.out / "parity").mkdir(parents=True, exist_ok=True)
    _check_alike(plan)
    synthetic.write(plan.out / "model")
    for stage in dict.fromkeys(each.stage for each in RUNS):
        if not any(_missing(plan, each, context) for each in RUNS if each.stage == stage for context in CONTEXTS):
            tell(f"{stage}: nothing left to ask")
            continue
        try:
            _stage(plan, stage, tell)
        except (ServeError, http.NoAnswer, ValueError, OSError) as error:
            tell(f"{stage} failed: {error}")
    lines = list(compare(plan))
    if lines:
        tell(f"recorded: {campaign.store(lines, EXPERIMENT, plan.out / 'records')}")
    for line in lines:
        found = ", ".join(f"{name} {value:.4g}" for name, value in line.result.items() if value is not None)
        tell(f"{line.case}: {'kept' if line.check['passed'] else 'NOT KEPT'}: {found}")
    return bool(lines) and lines[-1].check["passed"]


def describe(plan: campaign.Plan) -> Iterator[str]:
    """The environment and the command line of each server, and what it is asked."""
    for stage in dict.fromkeys(each.stage for each in RUNS):
        yield f"parity_{stage}: {config(plan, stage).command_line}"
        for each in RUNS:
            if each.stage == stage:
                asked = ", ".join(f"{count} of {context} tokens" for context, count in CONTEXTS.items())
                yield f"  {each.name}: prompts in batches of {each.batch}: {asked}"


def _stage(plan: campaign.Plan, stage: str, tell: Callable[[str], None]) -> None:
    if plan.left < campaign.LEAST_S:
        return tell(f"{stage} not begun, the time is over")
    with Server(config(plan, stage), tell) as server:
        info = {"info": bench.account(server.info), "hooks": str(server.config.hooks)}
        write_atomically(_server_file(plan, stage), json.dumps(info))
        for context in CONTEXTS:
            for each in RUNS:
                if each.stage == stage:
                    _ask(plan, each, context, server.url, tell)


def _ask(plan: campaign.Plan, each: Run, context: int, url: str, tell: Callable[[str], None]) -> None:
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


def _batch(plan: campaign.Plan, each: Run, context: int, numbers: list[int], url: str) -> list[Answer]:
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


def _missing(plan: campaign.Plan, each: Run, context: int) -> list[int]:
    """Prompts without an answer; of a run that follows the reference, of those it can follow."""
    had, known = _read(plan, each), _read(plan, REFERENCE)
    numbers = [number for number in range(CONTEXTS[context]) if (context, number) not in had]
    return [number for number in numbers if each == REFERENCE or (context, number) in known]


def _check_alike(plan: campaign.Plan) -> None:
    for stage in {each.stage for each in RUNS}:
        if (path := _server_file(plan, stage)).is_file():
            info = json.loads(path.read_text(encoding="utf-8"))["info"]
            for name, had in (("layers", bench.layers(info)), ("context_length", info.get("context_length"))):
                if had not in (None, wanted := getattr(plan, name)):
                    raise ValueError(
                        f"{name} is {wanted}, and {plan.out.name} has answers with {had}: take another out"
                    )


def _server_file(plan: campaign.Plan, stage: str) -> Path:
    return plan.out / "parity" / f"{stage}.server.json"


def _file(plan: campaign.Plan, each: Run) -> Path:
    return plan.out / "parity" / f"{each.name}.jsonl"


def _read(plan: campaign.Plan, each: Run) -> dict[tuple[int, int], Answer]:
    path = _file(plan, each)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {answer.key: answer for answer in (Answer(**json.loads(line)) for line in lines)}


def compare(plan: campaign.Plan) -> Iterator[Record]:
    """A record for each context, and the last over all: none without answers from every run."""
    for case, contexts in [*((f"ctx{context}", [context]) for context in CONTEXTS), ("all", list(CONTEXTS))]:
        runs = [{k: a for k, a in _read(plan, each).items() if a.context in contexts} for each in RUNS]
        keys = sorted(runs[0].keys() & runs[1].keys() & runs[2].keys())
        if keys:
            expected = sum(CONTEXTS[context] for context in contexts)
            yield _record(plan, case, contexts, *([run[key] for key in keys] for run in runs), expected)


def difference(one: Answer, other: Answer) -> float:
    """The largest of any token's logprob, in nats; infinite where one of them is no number."""
    gaps = (abs(value - other.logprobs[token]) for token, value in one.logprobs.items())
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def _record(
    plan: campaign.Plan, case: str, contexts: list[int], reference: list[Answer], again: list[Answer],
    ours: list[Answer], expected: int,
) -> Record:  # fmt: skip
    followed = [a.first == b.first == c.first for a, b, c in zip(reference, again, ours, strict=True)]
    noise = list(map(difference, reference, again))
    differences = list(map(difference, reference, ours))
    decided = [answer.margin > max(noise) for answer in reference]
    changed = [a.second != b.second for a, b in zip(reference, ours, strict=True)]
    result = {
        "prompts": len(reference),
        "noise_mean": statistics.fmean(noise),
        "noise_max": max(noise),
        "difference_mean": statistics.fmean(differences),
        "difference_max": max(differences),
        "decided": sum(decided),
        "changed_decided": sum(a and b for a, b in zip(decided, changed, strict=True)),
        "changed": sum(changed),
        "changed_native": sum(a.second != b.second for a, b in zip(reference, again, strict=True)),
        "margin_median": statistics.median(answer.margin for answer in reference),
        "distinct": len({answer.second for answer in reference}),
    }
    broken = sum(math.isinf(max(pair)) for pair in zip(noise, differences, strict=True))
    errors = list(_complaints(result, expected, followed.count(False), broken))
    return bench.line(
        case,
        {"stage": OURS.stage, "against": REFERENCE.stage, "C": REFERENCE.batch, "C_again": AGAIN.batch,
         "contexts": contexts, "context_length": plan.context_length, "layers": plan.layers},
        experiment=EXPERIMENT,
        method={"name": "logprobs at the first decode step, after the reference's first token",
                "tokens": TOP, "allowed": ALLOWED},
        samples_us=[1e6 * sum(answer.seconds for answer in each) for each in (reference, again, ours)],
        check={"ok": len(reference), "failed": expected - len(reference), "passed": not errors, "errors": errors,
               "noise": _short(noise), "differences": _short(differences),
               "margins": _short(answer.margin for answer in reference)},
        server={stage: json.loads(_server_file(plan, stage).read_text(encoding="utf-8"))
                for stage in (REFERENCE.stage, OURS.stage)},
        result={name: value if math.isfinite(value) else None for name, value in result.items()},
    )  # fmt: skip


def _complaints(result: dict[str, float], expected: int, lost: int, broken: int) -> Iterator[str]:
    """What keeps the bounds from being kept."""
    if result["prompts"] < expected:
        yield f"{result['prompts']} of {expected} prompts answered by every run"
    if lost:
        yield f"{lost} prompts went on after another first token"
    if broken:
        yield f"{broken} prompts have a logprob that is no number"
    for kind in ("mean", "max"):
        ours, noise = result[f"difference_{kind}"], result[f"noise_{kind}"]
        if ours > ALLOWED * noise:
            yield f"difference_{kind} {ours:.4g} exceeds {ALLOWED:g} times the noise, {noise:.4g}"
    if result["changed_decided"]:
        yield f"{result['changed_decided']} tokens changed where native's margin exceeds its noise"
    if result["distinct"] <= result["prompts"] // 2:
        yield f"only {result['distinct']} different answers to {result['prompts']} prompts: the weights are degenerate"


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
