"""The config of a decoder: one frozen type for all forms of checkpoints.

`jaxkv.models.checkpoints` makes it from the keys of a `config.json` or a GGUF file.
`jaxkv.models.decoder` is the decoder.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones stay, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): low frequencies are divided by `factor`, high ones stay.

    Attributes:
      factor: how many times longer the context becomes.
      original_max_positions: the trained context.
      beta_fast: a frequency that turns at least this often within it stays.
      beta_slow: a frequency that turns at most this often within it is divided by `factor`.
      attention_factor: factor on rotated queries and keys.
      truncate: whether the two bounds are rounded outwards to whole channels.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one layer: the base, and how positions beyond training are scaled."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What differs between the layers of one decoder.

    Attributes:
      window: number of keys that a query sees, its own included; None for all.
      rope: the layer's rotary embedding.
    """

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention of every layer.

    Attributes:
      num_heads: H, query heads.
      num_kv_heads: K, KV heads; divides H.
      head_dim: D.
      scale: factor on q.k before the softmax.
      qkv_bias: whether the q, k and v projections have a bias.
      qk_norm: whether q and k have an RMS norm over D, before RoPE.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None keeps them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    qk_norm: bool = False
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama, Mistral, Qwen or Gemma families.

    Attributes:
      family: `llama`, `mistral`, `qwen2`, `qwen3`, `gemma2` or `gemma3`. It is a name only; the
        forward pass does not read it.
      vocab_size: V.
      width: E, width of the residual stream.
      mlp_width: F, width of the MLP.
      layers: one entry per layer.
      attention: the attention of all layers.
      max_positions: length of the longest sequence that the model was made for, in tokens.
      rms_eps: epsilon of every RMS norm.
      activation: activation function of the gated MLP.
      post_norms: whether attention and MLP also have a norm after them, before the residual sum
        (Gemma).
      embedding_scale: factor on token embeddings (Gemma: sqrt(E)).
      logit_soft_cap: soft cap of the output logits; None keeps them.
      tied_embeddings: whether the output head is the embedding table.
    """

    family: str
    vocab_size: int
    width: int
    mlp_width: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    max_positions: int
    rms_eps: float
    activation: Activation = "silu"
    post_norms: bool = False
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    tied_embeddings: bool = True
