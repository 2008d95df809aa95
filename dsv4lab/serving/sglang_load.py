"""The load as SGLang's own serving benchmark drives it: its queue starts the requests, and it keeps its own account.

What it sends and reads itself is not used. It takes a stream that ends in an error for a success with all the tokens
that were asked for, it sees no token of a server without a tokenizer, and it wants one for itself. So it gets a backend
that sends ours (`load`), and prompts of token ids.
"""

import io
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from types import ModuleType
from typing import Any

from dsv4lab.serving.guard import one_line
from dsv4lab.serving.load import Job, Outcome, Shape

_PLACES = ("sglang.benchmark.serving", "sglang.bench_serving")
_BACKEND = "dsv4lab-sglang"  # with "sglang" in its name it is asked what it knows of the server


class _NoTokenizer:
    """Nothing is text here, and so nothing has tokens to count again."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return []


class Benchmark:
    """What starts the requests of a wave; `accounts`: what SGLang says of each wave, by its own names.

    ValueError if SGLang's benchmark does not load here.
    """

    def __init__(self):
        self.module = _module()
        self.accounts: list[dict[str, Any]] = []

    async def __call__(self, url: str, shape: Shape, jobs: Sequence[Job]) -> None:
        module, of_prompt = self.module, {id(job.body["input_ids"]): job for job in jobs}

        async def request(request_func_input: Any, pbar: Any = None) -> Any:
            job = of_prompt[id(request_func_input.prompt)]
            await job.run()
            return _told(module.RequestFuncOutput.init_new(request_func_input), job.outcome)

        module.ASYNC_REQUEST_FUNCS[_BACKEND] = request
        module.set_global_args(_arguments(shape, len(jobs)))
        rows = [module.DatasetRow(job.body["input_ids"], shape.input, shape.output) for job in jobs]
        try:
            with redirect_stdout(io.StringIO()):
                account = await module.benchmark(
                    backend=_BACKEND, api_url=f"{url}/generate", base_url=url, model_id="", tokenizer=_NoTokenizer(),
                    input_requests=rows, request_rate=inf, max_concurrency=len(jobs), disable_tqdm=True, lora_names=[],
                    lora_request_distribution=None, lora_zipf_alpha=None, extra_request_body={}, profile=False,
                    warmup_requests=0,
                )  # fmt: skip
            self.accounts.append(account)
        except Exception as error:  # what had been answered by then is
            for job in (job for job in jobs if not job.outcome.end):
                job.outcome.end = time.perf_counter()
                job.outcome.error = one_line(f"SGLang's benchmark: {type(error).__name__}: {error}")


def installed() -> bool:
    """Whether SGLang is here with what its benchmark imports, of which a server has no need."""
    return all(find_spec(name) for name in ("sglang", "datasets"))


def _module() -> ModuleType:
    for place in _PLACES:
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            missing = error.name
            continue
        asks = import_module("requests").Session()
        asks.trust_env = False  # a proxy cannot reach this machine's servers
        module.requests = asks
        return module
    raise ValueError(f"SGLang's benchmark does not load: there is no {missing}; --driver own needs none")


def _told(output: Any, outcome: Outcome) -> Any:
    """An outcome in SGLang's terms: its gaps are of tokens, ours of chunks."""
    output.success, output.error = not outcome.error, outcome.error
    output.start_time, output.latency = outcome.start, time.perf_counter() - outcome.start
    output.output_len, output.cached_tokens = outcome.tokens, outcome.cached
    output.ttft = outcome.arrivals[0][0] - outcome.start if outcome.arrivals else 0.0
    for (before, had), (came, tokens) in pairwise(outcome.arrivals):
        output.itl += [(came - before) / (tokens - had)] * (tokens - had)
    return output


def _arguments(shape: Shape, requests: int) -> Namespace:
    """Its command line, of which it reads some while it runs."""
    return Namespace(
        backend=_BACKEND, dataset_name="random-ids", num_prompts=requests, random_input_len=shape.input,
        random_output_len=shape.output, random_range_ratio=1.0, sharegpt_output_len=None, warmup_requests=0,
        disable_stream=not shape.stream, output_file=os.devnull, output_details=False, plot_throughput=False,
        cache_report=False, tag=None, goodput=None, profile_steps=None, mooncake_num_rounds=1,
    )  # fmt: skip
