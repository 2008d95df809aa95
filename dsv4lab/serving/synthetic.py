"""A model directory with DeepSeek-V4-Flash's true dimensions and nothing to download: `config.json` alone.

SGLang fills the weights with `--load-format dummy`: good to measure speed with, and for nothing else.
"""

import json
from pathlib import Path

from dsv4lab.files import write_atomically
from dsv4lab.model import DSV4_FLASH

_FROM_MODEL = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank",
    "o_lora_rank", "o_groups", "index_head_dim", "index_n_heads", "index_topk", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window",
    "hc_mult", "hc_sinkhorn_iters", "num_nextn_predict_layers",
)  # fmt: skip
_REST = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "expert_dtype": "fp4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
LAYER_BYTES = 6.1 * 2**30
"""FP8 weights of one layer, nearly all of them experts."""


def config() -> dict:
    """The model's `config.json`, with all its layers: SGLang is told on its command line to take the first few."""
    dimensions = {name: getattr(DSV4_FLASH, name) for name in _FROM_MODEL}
    rope = {"qk_rope_head_dim": DSV4_FLASH.rope_head_dim, "compress_ratios": list(DSV4_FLASH.compress_ratios)}
    return _REST | dimensions | rope


def write(folder: Path) -> Path:
    """Makes `folder` a model directory; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", json.dumps(config(), indent=1))
    return folder


def layer_flags(layers: int) -> list[str]:
    """The flags that make SGLang take the first `layers` layers. ValueError if there are not as many."""
    if not 1 <= layers <= DSV4_FLASH.num_hidden_layers:
        raise ValueError(f"layers must be in 1..{DSV4_FLASH.num_hidden_layers}, got {layers}")
    return ["--json-model-override-args", json.dumps({"num_hidden_layers": layers})]
