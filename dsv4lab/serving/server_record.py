"""A record of a server: under which experiment, what is kept of its account of itself, no path of the machine's."""

import json
from datetime import UTC, datetime
from typing import Any

from dsv4lab.files import without_folders
from dsv4lab.records import Clocks, Environment, Git, Record

EXPERIMENT, SHARED = "serving", "serving_tp"
"""The experiments that a server on one GPU, and one that several share, is recorded under."""
_KEPT = (
    "version", "model_path", "load_format", "json_model_override_args", "quantization", "kv_cache_dtype", "tp_size",
    "pp_size", "dp_size", "nnodes", "context_length", "page_size", "max_total_num_tokens", "max_running_requests",
    "mem_fraction_static", "chunked_prefill_size", "cuda_graph_bs", "cuda_graph_max_bs", "cuda_graph_config",
    "disable_cuda_graph", "disable_radix_cache", "disable_custom_all_reduce", "enable_nccl_nvls",
    "enable_torch_compile", "attention_backend", "moe_runner_backend",
    "fp8_gemm_runner_backend", "speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens",
)  # fmt: skip


def experiment(tp: int) -> str:
    """Of a server that `tp` GPUs share: no table mixes them."""
    return EXPERIMENT if tp == 1 else SHARED


def line(
    case: str,
    config: dict[str, Any],
    *,
    method: dict[str, Any],
    samples_us: list[float],
    check: dict[str, Any],
    result: dict[str, float | None],
    server: dict[str, Any],
    experiment: str = EXPERIMENT,
    seed: int = 0,
    clocks: Clocks | None = None,
) -> Record:
    """A record of a server, paths cut; `config` carries the stage, by which the implementation is called."""
    env, git, argv = provenance()
    return Record(
        experiment=experiment,
        case=case,
        impl=config["stage"],
        config=config,
        method=method,
        samples_us=samples_us,
        check=_local(check),
        work=None,
        seed=seed,
        argv=argv,
        date_utc=datetime.now(UTC),
        git=git,
        kernel_sha256=None,
        env=env,
        clocks=clocks or Clocks(before=None, after=None),
        server=_local(server),
        result=result,
    )


def account(info: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a server's account of itself, with its memory in GB for each replica."""
    kept = {name: info[name] for name in _KEPT if name in info}
    return kept | {"memory_gb": [state.get("memory_usage") for state in info["internal_states"]]}


def layers(info: dict[str, Any]) -> int | None:
    """Of the model as the server's flags change it; None if they leave that to the model."""
    try:
        return json.loads(info.get("json_model_override_args") or "{}").get("num_hidden_layers")
    except ValueError:
        return None


def _local(value: Any) -> Any:
    """`value` with every absolute path cut to its last part: records are published."""
    if isinstance(value, dict):
        return {name: _local(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_local(item) for item in value]
    return without_folders(value) if isinstance(value, str) else value


def provenance() -> tuple[Environment, Git, list[str]]:
    """Where this process runs, of which commit it is, how it was called."""
    from dsv4lab.provenance import command_line, environment, git_state

    return environment(), git_state(), command_line()
