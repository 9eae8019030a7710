"""A Hugging Face `config.json` as a ModelConfig, in the forms that transformers 4 and 5 write.

A missing key has the default of transformers for that family. Most sizes have no default, except in
Gemma 3, whose files on the hub state only what differs. `keys` says which other keys are accepted.
`generation_config.json`, which says how to sample, is not read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv.config_keys import FULL, HARMLESS, SIZES, SLIDING, VISION
from jaxkv.models.checkpoints.hf_rope import longest_sequence, ropes_from_hf
from jaxkv.models.checkpoints.keys import Keys
from jaxkv.models.config import Activation, AttentionConfig, LayerConfig, ModelConfig
from jaxkv.models.errors import ModelError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_HARMLESS = HARMLESS | {"max_window_layers"}  # where no family reads it
_NEUTRAL = {"partial_rotary_factor": 1.0, "is_causal": True}


@dataclass(frozen=True)
class _Family:
    """How one `model_type` differs from Llama.

    Attributes:
      name: family in the ModelConfig.
      architectures: those with these weights and a language model's head.
      defaults: values of keys that the file may leave out, besides `SIZES`.
      qkv_bias: whether q, k and v have biases. `attention_bias` would add one to the output, which
        is refused.
      qk_norm: whether q and k are normalised per head.
      gemma: whether there are norms after attention and MLP, norm weights stored as `w - 1`, scaled
        embeddings, and a query scale of its own.
      two_bases: whether sliding layers have their own RoPE base.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    two_bases: bool = False


_COMMON = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = _COMMON | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_FAMILIES = {
    "llama": _Family("llama", ("LlamaForCausalLM",), _COMMON | {"max_position_embeddings": 2048}),
    "mistral": _Family(
        "mistral", ("MistralForCausalLM",), _COMMON | {"max_position_embeddings": 131_072}
    ),
    "qwen2": _Family("qwen2", ("Qwen2ForCausalLM",), _QWEN, qkv_bias=True),
    "qwen3": _Family("qwen3", ("Qwen3ForCausalLM",), _QWEN, qk_norm=True),
    "gemma2": _Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        gemma=True,
    ),
    "gemma3_text": _Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _GEMMA
        | {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        qk_norm=True,
        gemma=True,
        two_bases=True,
    ),
}


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads the config of a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 text model.

    A `gemma3` with a vision tower is read as its text model.

    Args:
      raw: the parsed JSON object.
      where: text that error messages start with.

    Raises:
      ModelError: an architecture, a key or a value is not implemented; the message names it.
    """
    if raw.get("model_type") == "gemma3":
        raw = _gemma3_text(raw, where)
    model_type = raw.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ModelError(f"{where}: model_type {model_type!r} is not supported; known: {known}")
    architectures = raw.get("architectures")
    if architectures and not set(family.architectures) & set(architectures):
        raise ModelError(
            f"{where}: architectures {architectures} is not supported; "
            f"{' or '.join(family.architectures)} is"
        )
    keys = Keys(raw, where, defaults={**SIZES.get(raw["model_type"], {}), **family.defaults})
    ropes = ropes_from_hf(keys, where, two_bases=family.two_bases)
    width = keys.integer("hidden_size")
    config = ModelConfig(
        family=family.name,
        vocab_size=keys.integer("vocab_size"),
        width=width,
        mlp_width=keys.integer("intermediate_size"),
        layers=tuple(LayerConfig(window=w, rope=ropes[k]) for k, w in _layers(keys, family)),
        attention=_attention(keys, family, width),
        max_positions=longest_sequence(keys.integer("max_position_embeddings"), ropes),
        rms_eps=keys.number("rms_norm_eps"),
        activation=_activation(keys, family),
        post_norms=family.gemma,
        embedding_scale=math.sqrt(width) if family.gemma else 1.0,
        logit_soft_cap=keys.number_or_none("final_logit_softcapping") if family.gemma else None,
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )
    keys.refuse_unread(harmless=_HARMLESS, neutral=_NEUTRAL)
    return config


def _gemma3_text(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the object of the text model, with the keys of the outer object that belong to it."""
    outer = Keys(raw, where)
    text = {"model_type": "gemma3_text", **(outer.mapping("text_config") or {})}
    if (tied := outer.get("tie_word_embeddings")) is not None:
        text["tie_word_embeddings"] = tied
    outer.refuse_unread(harmless=_HARMLESS | VISION)
    return text


def _attention(keys: Keys, family: _Family, width: int) -> AttentionConfig:
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.integer_or_none("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    head_dim = keys.integer_or_none("head_dim")
    if head_dim is None:
        if width % num_heads:
            raise keys.error("num_attention_heads", f"must divide hidden_size = {width}")
        head_dim = width // num_heads
    if head_dim % 2:
        raise keys.error("head_dim", "must be even for rotary embeddings")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=(keys.number("query_pre_attn_scalar") if family.gemma else head_dim) ** -0.5,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        soft_cap=keys.number_or_none("attn_logit_softcapping") if family.gemma else None,
    )


def _activation(keys: Keys, family: _Family) -> Activation:
    name = "hidden_act"
    if family.gemma:
        keys.get(name)  # Gemma's files have it too, and transformers ignores it
        name = "hidden_activation"
    value = keys.get(name)
    if value not in _ACTIVATIONS:
        raise keys.error(name, f"is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[value]


def _layers(keys: Keys, family: _Family) -> list[tuple[str, int | None]]:
    """Returns the kind and the window of each layer, from `layer_types` or the family's pattern."""
    num_layers = keys.integer("num_hidden_layers")
    window = None if family.name == "llama" else keys.integer_or_none("sliding_window")
    if family.name.startswith("qwen") and not keys.flag("use_sliding_window"):
        window = None
    sliding = _sliding(keys, family, num_layers, window)
    kinds = keys.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if s else FULL for s in sliding]
    elif not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.error("layer_types", f"must list one kind for each of {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise keys.error("layer_types", f"has {unknown[0]!r}; only {FULL} and {SLIDING} are known")
    if family.name in ("llama", "mistral") and kinds != [SLIDING if s else FULL for s in sliding]:
        raise keys.error("layer_types", f"is not supported: every {family.name} layer is alike")
    if SLIDING in kinds and window is None:
        raise keys.error("layer_types", f"has {SLIDING}, but there is no sliding_window in use")
    return [(kind, window if kind == SLIDING else None) for kind in kinds]


def _sliding(keys: Keys, family: _Family, num_layers: int, window: int | None) -> list[bool]:
    """Returns which layers slide if the file does not list them."""
    match family.name:
        case "gemma2":
            return [i % 2 == 0 for i in range(num_layers)]
        case "gemma3":
            pattern = keys.integer("sliding_window_pattern")
            return [(i + 1) % pattern != 0 for i in range(num_layers)]
        case "qwen2" | "qwen3":
            first = keys.integer("max_window_layers", least=0)
            return [window is not None and i >= first for i in range(num_layers)]
        case _:
            return [window is not None] * num_layers
