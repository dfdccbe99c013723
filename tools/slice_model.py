"""Write a config-only checkpoint that is one tensor-parallel rank's share of a DeepSeek-Sparse-Attention model.

    python tools/slice_model.py OUT_DIR [--model glm52|dsv32] [--layers 24] [--tp 8]

With ``--load-format dummy`` vLLM fills it with random weights, so decode runs with the real shapes on one GPU and no
download. A word-level tokenizer is written along, so that it can be served and benchmarked over HTTP. Dimensions are the
published ones of GLM-5.2 (``glm_moe_dsa``) and DeepSeek-V3.2 (``deepseek_v32``), heads, FFN widths and vocabulary divided by TP.
"""

import argparse
import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "use_cache": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "glm52": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "vocab_size": 154880,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
    },
    "dsv32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "vocab_size": 129280,
        "n_group": 8,
        "topk_group": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
SHARDED = ("intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def config(model: str, layers: int, tp: int) -> dict[str, Any]:
    """The ``config.json`` of one rank's share.

    Raises:
        ValueError: `tp` does not divide a sharded dimension.
    """
    out = COMMON | MODELS[model] | {"num_hidden_layers": layers}
    if layers < 1 or tp < 1:
        raise ValueError(f"layers and tp: expected positive numbers, got {layers} and {tp}")
    for key in SHARDED:
        if out[key] % tp:
            raise ValueError(f"tp: expected a divisor of {key} = {out[key]}, got {tp}")
        out[key] //= tp
    return out


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """A ``tokenizer.json`` whose words are ``w3``, ``w4``, ...: one token a word."""
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(len(SPECIAL), vocab_size))]
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": SPECIAL["unk_token"]},
    }


def write(out: Path, model: str = "glm52", layers: int = 24, tp: int = 8) -> None:
    """Write the checkpoint directory."""
    made = config(model, layers, tp)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(made, indent=1))
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(made["vocab_size"])))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="glm52")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tp", type=int, default=8)
    args = parser.parse_args()
    try:
        write(args.out, args.model, args.layers, args.tp)
    except ValueError as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
