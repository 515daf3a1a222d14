"""A Hugging Face configuration as named sizes, which is what the tables of `families` speak of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weightcast.sources.megatron.layouts import Sizes
from weightcast.sources.megatron.rules import Config, Family

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def read_config(source: Any) -> Config:
    """The fields of a transformers configuration, a mapping, a config.json or the directory that has one.

    Raises ValueError for what is none of these, FileNotFoundError for a path where none is.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        config: Any = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    else:
        config = source.to_dict() if hasattr(source, "to_dict") else source
    try:
        fields = dict(config)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"hf_config is {type(source).__name__}: give a transformers config, a dict or a path") from exc
    if "model_type" not in fields:
        fields["model_type"] = getattr(source, "model_type", "")
    return fields


def sizes_of(family: Family, config: Config) -> Sizes:
    """Every size that a table may name; what a model has not is 0. Raises ValueError for a configuration without."""
    missing = [name for name in _NEEDED if name not in config]
    if missing:
        raise ValueError(f"hf_config lacks {', '.join(missing)}: give the model's config.json")
    get = config.get
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups, head_dim = get("num_key_value_heads") or heads, get("head_dim") or hidden // heads
    # Of multi-head latent attention.
    nope, rope, value = get("qk_nope_head_dim") or 0, get("qk_rope_head_dim") or 0, get("v_head_dim") or 0
    q_rank, kv_rank = get("q_lora_rank") or 0, get("kv_lora_rank") or 0
    sizes = {
        "one": 1,
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "twice_hidden": 2 * hidden,
        "vocab": config["vocab_size"],
        "tied": int(get("tie_word_embeddings") or 0),
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "query": heads * head_dim,
        "key": groups * head_dim,
        "qkv_bias": int(get("attention_bias") or 0),
        "proj_bias": int(get("attention_bias") or 0),
        "mlp_bias": int(get("mlp_bias") or 0),
        "ffn": get("intermediate_size") or 0,
        "experts": next((config[name] for name in _EXPERTS if get(name)), 0),
        "moe_ffn": get("moe_intermediate_size") or 0,
        "shared_ffn": (get("n_shared_experts") or 0) * (get("moe_intermediate_size") or 0),
        "q_rank": q_rank,
        "no_q_rank": int(not q_rank),
        "kv_rank": kv_rank,
        "latent_kv": kv_rank + rope,
        "latent_query": heads * (nope + rope),
        "latent_key_value": heads * (nope + value),
        "latent_out": heads * value,
    }
    for name, source in family.sizes.items():
        if isinstance(source, int):
            sizes[name] = source
            continue
        field, _, default = source.partition("|")
        if get(field) is None and not default:
            raise ValueError(f"hf_config lacks {field}: give the model's config.json")
        sizes[name] = int(default if get(field) is None else config[field])
    sizes["untied"] = int(not sizes["tied"])
    return sizes
