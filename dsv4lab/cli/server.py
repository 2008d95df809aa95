"""Commands around a server: start it, load it, walk the campaign, compare two."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from dsv4lab.cli.options import Folder, Names, OptionalFolder, OptionalNumber
from dsv4lab.notebooks.results import UsageError


def serve(
    model: Annotated[Positional[str], arg(metavar="[MODEL]", help_behavior_hint="")] = "",
    /,
    *,
    preset: Annotated[str, arg(metavar="NAME")] = "single",
    hooks: Annotated[str | None, arg(metavar="HOOK=IMPL,...", help_behavior_hint="")] = None,
    tp: OptionalNumber = None,
    context_length: OptionalNumber = None,
    layers: OptionalNumber = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    nnodes: int = 1,
    node_rank: int = 0,
    dist_init_addr: Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    out: OptionalFolder = None,
    timeout: float = 1800,
    sglang: Names = (),
) -> int:
    """Serve a model with SGLang and our kernels, proven to be live; ends with everything it started.

    Example: dsv4lab serve deepseek-ai/DeepSeek-V4-Flash --preset rtx6000-8x -- --mem-fraction-static 0.85

    Args:
        model: A folder, or a name on the Hugging Face hub. A preset with a synthetic model needs none.
        preset: All our kernels on RTX PRO 6000 (rtx6000-8x, rtx6000-2x); SGLang as it is, on an H200 (h200) or any GPU
            (single); synthetic, six layers with dummy weights and no download; or a stage of the campaign.
        hooks: What runs in SGLang's place, over the preset: attention=gluon,indexer=triton,topk=triton,mhc=split_k,
            gemm=split_k,gate=split_k,slots=triton,head=split_k. What is not named is SGLang's own.
        tp: GPUs that share the model.
        context_length: Longest request in tokens.
        layers: Layers of a synthetic model.
        host: Address to answer on.
        port: Port to answer on.
        nnodes: Machines that share the model.
        node_rank: Which of them this is.
        dist_init_addr: Where they meet.
        out: Folder for log, receipts and a synthetic model. A new temporary one if not given.
        timeout: Seconds until the server must be ready; the first start on a machine compiles for minutes.
        sglang: A flag for SGLang itself; what comes after -- is taken as such.
    """
    from dsv4lab.serving import launch, machine, settings

    try:
        setting = None if hooks is None else settings.parse(hooks)
        config = launch.Config(
            model=model, preset=preset, setting=setting, tp=tp, context_length=context_length, layers=layers, host=host,
            port=port, nnodes=nnodes, node_rank=node_rank, dist_init_addr=dist_init_addr, flags=sglang, run=out,
            timeout_s=timeout,
        )  # fmt: skip
        for gpu in machine.gpus()[:1]:
            config = config.with_tables(gpu.name)
        with launch.Server(config, say=lambda text: print(text, flush=True)) as server:
            live = ", ".join(f"{hook}={impl}" for hook, impl in config.hooks.active.items()) or "none"
            print(f"ready: {server.url}, hooks live on {server.ranks} ranks: {live}, log: {server.log}", flush=True)
            server.wait()
            return 0
    except launch.ServeError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def bench(
    url: Annotated[Positional[str], arg(metavar="URL")] = "http://127.0.0.1:30000",
    /,
    *,
    concurrency: Annotated[str, arg(metavar="C,C,...")] = "1,16,32,64",
    input: int = 256,
    output: int = 256,
    waves: int = 3,
    no_stream: bool = False,
    driver: Literal["sglang", "own", ""] = "",
    seed: int = 0,
    expect: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = (),
    stage: Annotated[str, arg(help_behavior_hint="")] = "",
    out: OptionalFolder = None,
) -> int:
    """Measure a server under load and record it; failures come first, and make the exit status 1 above 1%.

    Example: dsv4lab bench http://127.0.0.1:30000 --concurrency 1,64 --expect context_length=1048576

    Args:
        url: Of an SGLang server.
        concurrency: Requests at once, one run each.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        waves: How often; the median counts.
        no_stream: Take answers whole: less work for server and client, and no times to first token.
        driver: What starts the requests of a wave: SGLang's own serving benchmark, whose account is then recorded
            beside ours, or all at once (own). The former where it is installed, if not given.
        seed: Of the prompts.
        expect: What the server must say of itself, or hooks=HOOK=IMPL,... live; else nothing is timed.
        stage: What the records call it. The preset it was started with, if here.
        out: Folder for the record file. records/ of the checkout if not given.
    """
    from dsv4lab.serving import bench as module
    from dsv4lab.serving import http, sglang_load

    try:
        counts = _numbers("--concurrency", concurrency)
        expected = dict(_pair(text) for text in expect)
        shape = module.Shape(input, output, not no_stream)
        driver = driver or ("sglang" if sglang_load.installed() else "own")
        plan = module.Plan(counts, shape, waves, seed, expected, driver=driver)
        path, valid = module.run(url.rstrip("/"), plan, stage=stage, directory=out)
    except http.NoAnswer as error:
        print(f"dsv4lab: {url}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"recorded: {path}")
    return 0 if valid else 1


def campaign(
    *,
    stages: Annotated[str, arg(metavar="STAGE,...", help_behavior_hint="(default: all)")] = "",
    layers: int = 6,
    context_length: int = 1_048_576,
    input: int = 256,
    output: int = 256,
    waves: int = 3,
    warm_up: int = 16,
    steps: int = 3,
    eager: bool = False,
    tp: int = 1,
    budget_s: float = 7200,
    start_s: float = 900,
    port: OptionalNumber = None,
    out: Folder = Path("campaign"),
    together: bool = False,
    dry_run: bool = False,
    sglang: Names = (),
) -> int:
    """Walk the campaign on a live server, stage by stage: start, prove the hooks, bench, profile, stop.

    Several at once, each on GPUs of its own (CUDA_VISIBLE_DEVICES) and with the same folder, share the stages.

    Example: dsv4lab campaign --stages stock,indexer --budget-s 900 --out campaign

    Args:
        stages: Which of indexer, native, indexer_tuned, native_tuned, indexer_ctx8192, native_auto, stock, split_k,
            mma, bf16, stock_ctx8192, indexer_stock_gemm, indexer_stock_mhc, attention_twice, compile, compile_nographs,
            compile_stock_attention, done in this order; what is done in the folder of --out is not done again.
        layers: Layers of the synthetic model.
        context_length: Longest request in tokens, for the stages that cap none.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        waves: How often at each concurrency; the median counts.
        warm_up: Tokens of an answer in the unmeasured wave before.
        steps: Decode steps in a profile.
        eager: Also profile stock and indexer without graphs, with shapes and stacks: a second start of each.
        tp: GPUs that share the model; with more than one, stages are named, and recorded, apart.
        budget_s: Seconds for all; what is not done by then is left for another time.
        start_s: Seconds until a server must be ready.
        port: Port of the servers; 30000 and the number of the first GPU in CUDA_VISIBLE_DEVICES if not given.
        out: Folder of records, traces and logs.
        together: Keep step with other campaigns of this folder: load and profile at the same moments, and begin no
            stage before theirs has ended, so that what the host gives both is the same.
        dry_run: Only say with what environment and command line each stage would start.
        sglang: A flag for SGLang itself, in every stage; what comes after -- is taken as such.
    """
    from dsv4lab.serving import campaign as module
    from dsv4lab.serving import load, machine
    from dsv4lab.serving import stages as known

    try:
        chosen = known.choose([name for name in stages.split(",") if name])
        plan = known.Plan(
            out=out.resolve(), layers=layers, context_length=context_length, shape=load.Shape(input, output),
            waves=waves, warm_up=warm_up, steps=steps, eager=eager, budget_s=budget_s, start_s=start_s,
            port=machine.usual_port() if port is None else port, tp=tp, flags=sglang, together=together,
        )  # fmt: skip
        if dry_run:
            print(*known.describe(plan, chosen), sep="\n")
            return 0
        return 0 if module.run(plan, chosen, say=lambda text: print(text, flush=True)) else 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def parity(
    *,
    layers: int = 6,
    context_length: int = 1_048_576,
    tp: int = 1,
    budget_s: float = 900,
    start_s: float = 600,
    port: OptionalNumber = None,
    out: Folder = Path("campaign"),
    dry_run: bool = False,
    sglang: Names = (),
) -> int:
    """Ask whether our kernels answer as SGLang's own: logprobs of 256 prompts on two servers with the same weights.

    With --tp N: whether they answer on N GPUs as on one, within what SGLang's own answers differ between the two.

    Example: dsv4lab parity --budget-s 600 --out campaign

    Args:
        layers: Layers of the synthetic model, which has random weights here.
        context_length: Longest request in tokens.
        tp: GPUs that share the model, in the two servers that are compared with those on one.
        budget_s: Seconds for all; what is not answered by then is left for another time.
        start_s: Seconds until a server must be ready.
        port: Port of the servers; 30000 and the number of the first GPU in CUDA_VISIBLE_DEVICES if not given.
        out: Folder of answers, records and logs; what it has is not asked again.
        dry_run: Only say with what environment and command line each server would start, and what it is asked.
        sglang: A flag for SGLang itself, in every server; what comes after -- is taken as such.
    """
    from dsv4lab.serving import machine, stages
    from dsv4lab.serving import parity as comparison

    try:
        plan = stages.Plan(
            out=out.resolve(), layers=layers, context_length=context_length, budget_s=budget_s, start_s=start_s,
            port=machine.usual_port() if port is None else port, tp=tp, flags=sglang,
        )  # fmt: skip
        if dry_run:
            print(*comparison.describe(plan), sep="\n")
            return 0
        return 0 if comparison.run(plan, say=lambda text: print(text, flush=True)) else 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise UsageError(f"{option} must read like 1,16,64, got {text!r}")
    return tuple(map(int, text.split(",")))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--expect {text} must read NAME=VALUE")
    return name, value
