"""What is published in a bench run: tensor specs of real architectures in checkpoint form, or synthetic ones.

Transformers builds the real architectures on the meta device, so that names and shapes are those of a checkpoint and
no memory is spent. The specs depend on nothing but the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightcast.cli.planned_bytes import equal, of_model
from weightcast.format.manifest import TensorSpec

Field = int | bool | None

# fmt: off
_COLUMNS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "tie_word_embeddings",
)
_TABLE: tuple[tuple[str, str, tuple[Field, ...], dict[str, Field]], ...] = (
    ("qwen3-0.6b", "qwen3", (1024, 28, 16, 8, 3072, 151936, True), {"head_dim": 128}),
    ("qwen3-1.7b", "qwen3", (2048, 28, 16, 8, 6144, 151936, True), {"head_dim": 128}),
    ("llama-3.2-1b", "llama", (2048, 16, 32, 8, 8192, 128256, True), {"head_dim": 64}),
    ("qwen3-30b-a3b", "qwen3_moe", (2048, 48, 32, 4, 6144, 151936, False), {
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    }),
    ("qwen3-next-80b-a3b", "qwen3_next", (2048, 48, 16, 2, 5120, 151936, False), {
        "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "decoder_sparse_step": 1,
    }),
    ("moonlight-16b-a3b", "deepseek_v3", (2048, 27, 16, 16, 11264, 163840, False), {
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }),
)
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
    "head_dim", "linear_key_head_dim", "linear_value_head_dim", "kv_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim",
)
# fmt: on

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Field]]] = {
    name: (model_type, dict(zip(_COLUMNS, common, strict=True)) | own) for name, model_type, common, own in _TABLE
}
"""A name -> transformers' model type, and the fields of the published configuration that differ from its config class's
defaults and bear on a tensor's name or shape."""

NAMES = (*ARCHITECTURES, "many-small", "uniform")


def named(
    shapes: str, *, layers: int | None = None, scale: int = 1, num_tensors: int = 500, num_bytes: int = 1 << 30
) -> Sequence[TensorSpec]:
    """The specs that `shapes` names.

    `layers` keeps the first layers of an architecture, `scale` divides its widths; the counts of heads and experts
    stay, as they decide how many tensors there are. `uniform` is `num_tensors` equal flat tensors that fill `num_bytes`
    (rounded down to whole bf16 elements). Raises ValueError for an unknown name or a size that is not positive.
    """
    if shapes == "many-small":
        return [TensorSpec(f"blocks.{number}.weight", "bfloat16", (64, 64)) for number in range(5000)]
    if shapes == "uniform":
        numel = num_bytes // 2 // num_tensors if num_tensors > 0 else 0
        if numel <= 0:
            raise ValueError(f"{num_tensors} tensors cannot share {num_bytes} bytes; each needs an element of 2")
        return equal(num_tensors * numel, num_tensors, "bfloat16")
    if shapes not in ARCHITECTURES:
        raise ValueError(f"no shapes {shapes!r}; known: {', '.join(NAMES)}")
    if scale < 1:
        raise ValueError(f"scale is {scale}; it divides widths, so it must be at least 1")
    if layers is not None and layers < 1:
        raise ValueError(f"layers is {layers}; keep at least one")
    from transformers import AutoConfig

    model_type, published = ARCHITECTURES[shapes]
    widths = {name: width for name in WIDTHS if isinstance(width := published.get(name), int)}
    # Rotary embeddings need an even width, hence 2 at least.
    fields = {**published, **{name: max(width // scale, 2) for name, width in widths.items()}}
    if layers is not None:
        fields["num_hidden_layers"] = min(layers, published["num_hidden_layers"] or layers)
    config = AutoConfig.for_model(model_type, **fields)
    return of_model(config, "bfloat16")
