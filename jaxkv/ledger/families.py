"""What the `model_type` of a config says beyond its keys: one row of a table per family.

The sources are the configuration and modelling files of that name in transformers. `mixers`, `mlps`
and `layer_kinds` read the layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxkv.config_keys import SIZES
from jaxkv.ledger import layer_kinds, mlps
from jaxkv.ledger.keys import Keys


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a `model_type` differs from Llama.

    Attributes:
      defaults: values of keys that its files may leave out; each one used becomes a note.
      tied: whether embedding and head are tied if the config does not say.
      qkv_bias: whether q, k and v have biases; None takes `attention_bias`.
      o_bias: whether the output projection has a bias; None takes `attention_bias`.
      norms: number of norms of width E per layer.
      norm_bias: whether these norms have biases.
      qk_norm: whether q and k have norms of width D.
      output_gate: whether the projection of q also makes a gate of the same size.
      sinks: whether each query head has a sink logit.
      kinds: rule for the kind of each layer if the config has no `layer_types`.
      mlp: reader of the MLP of each layer.
      latent: whether attention is multi-head latent attention.
      learned_positions: whether there is a table of positions.
      head_bias: whether the head has a bias.
      per_layer_inputs: whether there are Gemma 3n's further tables.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    norms: int = 2
    norm_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    kinds: layer_kinds.Rule = layer_kinds.all_full
    mlp: mlps.Reader = mlps.LLAMA
    latent: bool = False
    learned_positions: bool = False
    head_bias: bool = False
    per_layer_inputs: bool = False


_GEMMA = {"head_dim": 256}
_MISTRAL = Family(defaults=SIZES["mistral"], kinds=layer_kinds.windowed)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "smollm3": Family(tied=True, kinds=layer_kinds.smollm3),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "mixtral": Family(
        defaults={"num_key_value_heads": 8}, kinds=layer_kinds.windowed, mlp=mlps.mixtral
    ),
    "qwen2": Family(defaults=SIZES["qwen2"], qkv_bias=True, o_bias=False, kinds=layer_kinds.qwen),
    "qwen2_moe": Family(
        defaults={"shared_expert_intermediate_size": 5632},
        qkv_bias=True,
        o_bias=False,
        kinds=layer_kinds.qwen,
        mlp=mlps.qwen_moe,
    ),
    "qwen3": Family(defaults=SIZES["qwen3"], qk_norm=True, kinds=layer_kinds.qwen),
    "qwen3_moe": Family(
        defaults={"num_key_value_heads": 4},
        qk_norm=True,
        kinds=layer_kinds.qwen,
        mlp=mlps.qwen_moe,
    ),
    "qwen3_next": Family(
        defaults={"shared_expert_intermediate_size": 512},
        qk_norm=True,
        output_gate=True,
        kinds=layer_kinds.every_fourth_full,
        mlp=mlps.qwen_moe,
    ),
    "gemma": Family(defaults=_GEMMA, tied=True),
    "gemma2": Family(defaults=SIZES["gemma2"], tied=True, norms=4, kinds=layer_kinds.alternating),
    "gemma3_text": Family(
        defaults=SIZES["gemma3_text"],
        tied=True,
        norms=4,
        qk_norm=True,
        kinds=layer_kinds.patterned(6),
    ),
    "gemma3n_text": Family(
        defaults=_GEMMA,
        tied=True,
        norms=4,
        qk_norm=True,
        kinds=layer_kinds.patterned(5),
        mlp=mlps.gemma3n,
        per_layer_inputs=True,
    ),
    "deepseek_v2": Family(defaults={"q_lora_rank": 1536}, latent=True, mlp=mlps.deepseek),
    "deepseek_v3": Family(
        defaults={"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_shared_experts": 1},
        latent=True,
        mlp=mlps.deepseek,
    ),
    "kimi_k2": Family(latent=True, mlp=mlps.deepseek),
    "gpt_oss": Family(
        defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        kinds=layer_kinds.alternating,
        mlp=mlps.gpt_oss,
    ),
    "llama4_text": Family(
        defaults={"attention_chunk_size": 8192}, kinds=layer_kinds.llama4, mlp=mlps.llama4
    ),
    "minimax_text_01": Family(kinds=layer_kinds.minimax, mlp=mlps.mixtral),
    "phi": Family(
        qkv_bias=True,
        o_bias=True,
        norms=1,
        norm_bias=True,
        mlp=mlps.dense(gated=False, bias=True),
        head_bias=True,
    ),
    "phi3": Family(kinds=layer_kinds.windowed),
    "falcon": Family(
        tied=True,
        qkv_bias=False,
        o_bias=False,
        norms=1,
        norm_bias=True,
        mlp=mlps.dense(gated=False, bias=False),
    ),
    "gpt2": Family(
        tied=True,
        qkv_bias=True,
        o_bias=True,
        norm_bias=True,
        mlp=mlps.dense(gated=False, bias=True),
        learned_positions=True,
    ),
}


def guess(keys: Keys) -> Family:
    """Returns a family for a config with an unknown `model_type`, by the keys that it has."""
    rules = {
        "attn_type_list": layer_kinds.minimax,
        "full_attention_interval": layer_kinds.every_fourth_full,
        "sliding_window_pattern": layer_kinds.patterned(1),
        "_sliding_window_pattern": layer_kinds.patterned(1),
        "attention_chunk_size": layer_kinds.llama4,
        "max_window_layers": layer_kinds.qwen,
        "sliding_window": layer_kinds.windowed,
    }
    readers = {
        "n_routed_experts": mlps.deepseek,
        "moe_intermediate_size": mlps.qwen_moe,
        "num_local_experts": mlps.mixtral,
        "num_experts": mlps.mixtral,
    }
    return Family(
        kinds=next((rules[name] for name in rules if keys.given(name)), layer_kinds.all_full),
        mlp=next((readers[name] for name in readers if keys.given(name)), mlps.LLAMA),
        latent=keys.given("kv_lora_rank"),
    )
