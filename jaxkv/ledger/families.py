"""What the `model_type` of a config says beyond its keys: a row of a table each.

Sources: the configuration and modelling files of transformers of that name. Not here: how layers
are read (`mixers`, `mlps`, `layer_kinds`).
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
      defaults: of keys that its files may leave out; taken with a note.
      tied: of a config that does not say.
      qkv_bias, o_bias: whether there are such biases; None takes it from `attention_bias`.
      norms: of width E a layer; with `norm_bias` they have biases.
      qk_norm: norms of D on q and on k.
      output_gate: q's projection makes a gate of the same size.
      sinks: a logit a head.
      kinds: of each layer, of a config without `layer_types`.
      mlp: reads the MLP of each layer.
      latent: it has MLA.
      learned_positions, head_bias: there are such parameters.
      per_layer_inputs: Gemma 3n's further tables.
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
    """The family of a config whose `model_type` is not known, by the keys that it has."""
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
