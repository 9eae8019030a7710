"""The keys of a GGUF file as a ModelConfig.

What the keys leave out is filled in as in llama.cpp: which Gemma layers slide, the RoPE base of
Gemma 3's sliding layers, the query scale of the 27B models. `keys` says which unknown keys are
accepted. `gguf_reader` reads the weights, `jaxkv.models.tokenizer` the `tokenizer.*` keys.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxkv.models.checkpoints.gguf_file import GgufFile
from jaxkv.models.checkpoints.hf_rope import longest_sequence, yarn_magnitude
from jaxkv.models.checkpoints.keys import Keys
from jaxkv.models.checkpoints.rope_freqs import scaling_from_divisors
from jaxkv.models.config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from jaxkv.models.errors import ModelError

ROPE_FREQS = "rope_freqs.weight"
_HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
_NEUTRAL = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


@dataclass(frozen=True)
class _Arch:
    """How one `general.architecture` differs from Llama.

    Attributes:
      slides: whether the window key has a meaning.
      qk_norm: whether q and k are normalised per head.
      gemma: whether there are norms after attention and MLP, scaled embeddings, soft caps, and
        layers that slide.
      large: number of layers of the 27B model, whose query scale is (E / H)^-0.5, not D^-0.5.
      period: all but the last one of each `period` layers slide.
      local_theta: RoPE base, without scaling, of the layers that slide; None for the common base.
      soft_caps: soft caps of the attention logits and of the final logits.
    """

    slides: bool = False
    qk_norm: bool = False
    gemma: bool = False
    large: int = 0
    period: int = 0
    local_theta: float | None = None
    soft_caps: tuple[float | None, float | None] = (None, None)


_ARCHS = {
    "llama": _Arch(slides=True),
    "qwen2": _Arch(),
    "qwen3": _Arch(qk_norm=True),
    "gemma2": _Arch(slides=True, gemma=True, large=46, period=2, soft_caps=(50.0, 30.0)),
    "gemma3": _Arch(
        slides=True, qk_norm=True, gemma=True, large=62, period=6, local_theta=10_000.0
    ),
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Reads the config of a `llama`, `qwen2`, `qwen3`, `gemma2` or `gemma3` GGUF file.

    A `llama` with a sliding window is a Mistral.

    Raises:
      ModelError: an architecture, a key or a value is not implemented (the message names it), or
        the model is split over several files.
    """
    name = file.metadata.get("general.architecture")
    arch = _ARCHS.get(name) if isinstance(name, str) else None
    if arch is None or not isinstance(name, str):
        raise ModelError(
            f"{file.path}: general.architecture {name!r} is not supported; "
            f"known: {', '.join(_ARCHS)}"
        )
    if (num_files := file.metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(f"{file.path}: split.count = {num_files}: join the files into one first")
    keys = _keys(file, name, arch)
    width, num_layers = keys.integer("embedding_length"), keys.integer("block_count")
    context_length = keys.integer("context_length")
    attention = _attention(keys, file, arch, width, num_layers)
    full, local = _ropes(keys, file, arch, attention.head_dim)
    window = None
    if arch.slides and keys.get("attention.sliding_window"):
        window = keys.integer("attention.sliding_window")
    slides = _slides(keys, arch, num_layers, window)
    family = "mistral" if name == "llama" and window else name
    config = ModelConfig(
        family=family,
        vocab_size=_vocab_size(file),
        width=width,
        mlp_width=keys.integer("feed_forward_length"),
        layers=tuple(
            LayerConfig(window=window if s else None, rope=local if s else full) for s in slides
        ),
        attention=attention,
        max_positions=longest_sequence(context_length, {"full": full}),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if arch.gemma else "silu",
        post_norms=arch.gemma,
        embedding_scale=math.sqrt(width) if arch.gemma else 1.0,
        logit_soft_cap=keys.number_or_none("final_logit_softcapping") if arch.gemma else None,
        tied_embeddings="output.weight" not in file.tensors,
    )
    keys.refuse_unread(harmless=_HARMLESS, neutral=_NEUTRAL)
    return config


def _keys(file: GgufFile, name: str, arch: _Arch) -> Keys:
    """Returns the keys of the architecture; a list of equal values is one value."""
    prefix = f"{name}."
    values = {
        key.removeprefix(prefix): _plain(file.metadata[key])
        for key in file.metadata
        if key.startswith(prefix)
    }
    defaults = {
        "rope.freq_base": 10_000.0,
        "rope.scaling.original_context_length": values.get("context_length"),
        "attn_logit_softcapping": arch.soft_caps[0],
        "final_logit_softcapping": arch.soft_caps[1],
        "attention.sliding_window": 4096 if name == "gemma2" else None,
    }
    return Keys(values, str(file.path), prefix=prefix, defaults=defaults)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        # Numbers are float32: 9.999999747378752e-06 stands for 1e-5.
        return float(str(np.float32(value)))
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _attention(
    keys: Keys, file: GgufFile, arch: _Arch, width: int, num_layers: int
) -> AttentionConfig:
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer_or_none("attention.head_count_kv") or num_heads
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", f"must divide head_count = {num_heads}")
    head_dim = keys.integer_or_none("attention.key_length") or width // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer_or_none(key) not in (None, head_dim):
            raise keys.error(key, f"is not supported: it differs from the head dim {head_dim}")
    scaled = width // num_heads if arch.large == num_layers else head_dim
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scaled**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=arch.qk_norm,
        soft_cap=keys.number_or_none("attn_logit_softcapping") if arch.gemma else None,
    )


def _ropes(keys: Keys, file: GgufFile, arch: _Arch, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Returns the RoPE of full layers, and of sliding layers."""
    theta = keys.number("rope.freq_base")
    scaling = _scaling(keys)
    if ROPE_FREQS in file.tensors:
        if scaling is not None:
            raise keys.error("rope.scaling.type", f"is not supported together with {ROPE_FREQS}")
        scaling = _llama3(file, theta, head_dim)
    full = RopeConfig(theta=theta, scaling=scaling)
    if not arch.gemma:
        return full, full
    own = keys.number_or_none("rope.freq_base_swa")
    if arch.local_theta is not None:
        return full, RopeConfig(theta=own or arch.local_theta)
    return full, RopeConfig(theta=own or theta, scaling=scaling)


def _scaling(keys: Keys) -> RopeScaling | None:
    factors = [  # the newer name, then the older one; 0 means none
        keys.number(key) for key in ("rope.scaling.factor", "rope.scale_linear") if keys.get(key)
    ]
    factor = factors[0] if factors else None
    trained = keys.integer("rope.scaling.original_context_length")
    kind = keys.get("rope.scaling.type") or "linear"
    fast, slow = (keys.number_or_none(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow"))
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise keys.error("rope.scaling.type", "is not supported; none, linear and yarn are")
    if factor is None:
        raise keys.error("rope.scaling.type", "needs a rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    return YarnScaling(
        factor=factor,
        original_max_positions=trained,
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        attention_factor=yarn_magnitude(factor),
    )


def _llama3(file: GgufFile, theta: float, head_dim: int) -> RopeScaling | None:
    tensor = file.tensors[ROPE_FREQS]
    if tensor.shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: {ROPE_FREQS} has shape {list(tensor.shape)}, not D / 2")
    divisors = np.concatenate([values for _, values in file.blocks(tensor)])
    if np.all(divisors == 1):
        return None
    scaling = scaling_from_divisors(divisors, theta)
    if scaling is None:
        raise ModelError(
            f"{file.path}: {ROPE_FREQS} is not supported: its values are not a Llama 3 scaling"
        )
    return scaling


def _slides(keys: Keys, arch: _Arch, num_layers: int, window: int | None) -> list[bool]:
    """Returns which layers have a window."""
    if not arch.gemma:
        return [window is not None] * num_layers
    if window is None:
        raise keys.error("attention.sliding_window", "is missing")
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return [bool(slides) for slides in pattern]
    if isinstance(pattern, bool):
        return [pattern] * num_layers
    period = arch.period if pattern is None else keys.integer("attention.sliding_window_pattern")
    return [(i + 1) % period != 0 for i in range(num_layers)]


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: has no tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]
