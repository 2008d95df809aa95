"""The load: concurrent requests of token ids to an SGLang server, and what each of them came to.

A request that is refused, ends in an error, ends early or brings no token has failed, and nothing of it is counted.
Tokens are counted by the server's usage, never by chunks, of which one may hold several.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from dsv4lab.serving.guard import one_line
from dsv4lab.serving.http import headers

FIRST_ID, LAST_ID = 100, 120_000
"""Prompts are drawn from these: no special token among them."""

TIMEOUT_S = 600.0
_LONGEST_LINE = 1 << 24
"""Bytes of an event: SGLang repeats in each all the tokens so far."""


@dataclass
class Outcome:
    """One request. Times in seconds on one clock; `arrivals`: (when, tokens so far) of each chunk that brought some.

    steps: verification steps of a speculating server, else 0. cached: tokens of the prompt that the server had already.
    """

    start: float
    end: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0
    cached: int = 0
    error: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that count: none of a request that failed."""
        return self.arrivals[-1][1] if self.arrivals and not self.error else 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first chunk with a token; None if several came at once and no more."""
        first, had = self.arrivals[0]
        return first - self.start if had == 1 or self.arrivals[-1][1] > had else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first chunk; None if all came at once."""
        (first, had), (last, tokens) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (tokens - had) if tokens > had else None

    @property
    def steps_s(self) -> float | None:
        """Verification steps a second after the first chunk, which prefill brings; None without."""
        took = self.arrivals[-1][0] - self.arrivals[0][0]
        return self.steps / took if self.steps and took else None

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between chunks, which are not tokens."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals)]

    def tokens_until(self, when: float) -> int:
        """Tokens that had come by then."""
        return max((tokens for arrived, tokens in self.arrivals if arrived <= when), default=0)


@dataclass(frozen=True)
class Shape:
    """What every request of a load is: prompt tokens in, tokens out, and whether chunks are streamed."""

    input: int = 256
    output: int = 256
    stream: bool = True


def body(shape: Shape, rng: random.Random) -> dict[str, Any]:
    """One request to /generate, with a prompt of its own."""
    sampling = {"max_new_tokens": shape.output, "ignore_eos": True, "temperature": 0}
    prompt = [rng.randint(FIRST_ID, LAST_ID) for _ in range(shape.input)]
    return {"input_ids": prompt, "sampling_params": sampling, "stream": shape.stream}


@dataclass(frozen=True)
class Job:
    """One request that is to be sent: `run` sends it and fills the outcome."""

    body: dict[str, Any]
    outcome: Outcome
    run: Callable[[], Awaitable[None]]


Drive = Callable[[str, Shape, Sequence[Job]], Awaitable[None]]
"""What runs all jobs to a server, and returns when they have ended."""


async def together(url: str, shape: Shape, jobs: Sequence[Job]) -> None:
    """All at once."""
    await asyncio.gather(*(job.run() for job in jobs))


async def wave(
    url: str,
    shape: Shape,
    concurrency: int,
    seed: int,
    *,
    timeout_s: float = TIMEOUT_S,
    outcomes: list[Outcome] | None = None,
    drive: Drive = together,
) -> list[Outcome]:
    """`concurrency` requests at once; returns when the last has ended, or failed for taking longer than `timeout_s`.

    outcomes: an empty list that holds them from the start, for who wants to watch.
    """
    import aiohttp

    rng = random.Random(seed)
    bodies = [body(shape, rng) for _ in range(concurrency)]
    outcomes = [] if outcomes is None else outcomes
    outcomes += [Outcome(time.perf_counter()) for _ in bodies]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=timeout_s)
    options = dict(connector=connector, timeout=timeout, headers=headers(), read_bufsize=_LONGEST_LINE)
    async with aiohttp.ClientSession(**options) as session:
        pairs = zip(bodies, outcomes, strict=True)
        jobs = [Job(each, outcome, partial(_request, session, url, shape, each, outcome)) for each, outcome in pairs]
        await drive(url, shape, jobs)
    return outcomes


async def _request(session: Any, url: str, shape: Shape, payload: dict, outcome: Outcome) -> None:
    outcome.start = time.perf_counter()
    try:
        async with session.post(f"{url}/generate", json=payload) as answer:
            if answer.status != 200:
                outcome.error = f"HTTP {answer.status}: {one_line(await answer.text())[:200]}"
            elif shape.stream:
                await take(outcome, answer.content, shape.output)
            else:
                take_chunk(outcome, await answer.json(content_type=None))
                check_length(outcome, shape.output)
    except Exception as error:  # refused, broken off, or nothing that SGLang would say
        outcome.error = outcome.error or one_line(f"{type(error).__name__}: {error}")
    outcome.end = time.perf_counter()


async def take(outcome: Outcome, lines: AsyncIterator[bytes], expected: int) -> None:
    """Reads a stream of server-sent events into `outcome`."""
    finished = False
    async for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            finished = True
        elif data:
            take_chunk(outcome, json.loads(data))
    if not finished:
        outcome.error = outcome.error or "the stream broke off"
    check_length(outcome, expected)


def take_chunk(outcome: Outcome, chunk: Any) -> None:
    """One JSON answer, or part of one."""
    if not isinstance(chunk, dict) or "error" in chunk:
        outcome.error = outcome.error or one_line(json.dumps(chunk))[:200]
        return
    about = chunk.get("meta_info") or {}
    reason = about.get("finish_reason") or {}
    if isinstance(reason, dict) and reason.get("type") == "abort":
        outcome.error = outcome.error or f"aborted: {one_line(str(reason.get('message')))[:200]}"
    tokens = about.get("completion_tokens", 0)
    if tokens > (outcome.arrivals[-1][1] if outcome.arrivals else 0):
        outcome.arrivals.append((time.perf_counter(), tokens))
    outcome.steps = about.get("spec_verify_ct", outcome.steps)
    outcome.cached = about.get("cached_tokens", outcome.cached)


def check_length(outcome: Outcome, expected: int) -> None:
    """A request that was to go on to its end and did not has failed."""
    if not outcome.error and outcome.tokens != expected:
        outcome.error = f"{outcome.tokens} of {expected} tokens came" if outcome.tokens else "no token came"


def steady_window(outcomes: Sequence[Outcome]) -> tuple[float, float] | None:
    """From when every good request had its first token until the first of them had its last; None if they never met."""
    good = [outcome for outcome in outcomes if outcome.tokens]
    if not good:
        return None
    start, end = max(o.arrivals[0][0] for o in good), min(o.arrivals[-1][0] for o in good)
    return (start, end) if end > start else None
