"""How the layers of a config see other tokens: heads, latents, constant states, shared K and V.

`layer_kinds` says which layer is of which kind, and `mlps` reads the MLPs.
"""

from typing import NamedTuple

from jaxkv.config_keys import FULL, SLIDING
from jaxkv.ledger.errors import LedgerError
from jaxkv.ledger.families import Family
from jaxkv.ledger.keys import Keys
from jaxkv.ledger.layer_kinds import CHUNKED, LINEAR, layer_kinds, shared_sources
from jaxkv.ledger.shapes import ALL, Heads, Latent, Layer, Mixer, Shared, Span, State


class Sized(NamedTuple):
    """A mixer, with the number of entries of its projections, and of its norms and biases."""

    mixer: Mixer
    weights: int
    vectors: int


def read_layers(keys: Keys, family: Family, width: int, count: int) -> tuple[Layer, ...]:
    """Returns the layers of a config.

    Raises:
      LedgerError: keys are missing, contradict each other, or have an unknown value.
    """
    kinds = layer_kinds(keys, family.kinds, count)
    sources = shared_sources(keys, kinds)
    by_kind = {kind: _mixer(keys, family, width, kind) for kind in dict.fromkeys(kinds)}
    norms = family.norms * width * (2 if family.norm_bias else 1)
    layers = []
    for i, mlp in enumerate(family.mlp(keys, width, count)):
        mixer, weights, vectors = by_kind[kinds[i]]
        if i in sources:
            if not isinstance(mixer, Heads):
                raise LedgerError(f"{keys.where}: layers without KV heads cannot share them")
            mixer = Shared(mixer=mixer, source=sources[i])
        layers.append(Layer(mixer=mixer, mixer_weights=weights, vectors=vectors + norms, mlp=mlp))
    return tuple(layers)


def _mixer(keys: Keys, family: Family, width: int, kind: str) -> Sized:
    if family.latent:
        if kind != FULL:
            names = filter(keys.given, ("layer_types", "sliding_window", "attention_chunk_size"))
            name = next(names, "kv_lora_rank")
            raise LedgerError(
                f"{keys.where}: {name} asks for {kind}, which latent attention does not have"
            )
        return _latent(keys, width)
    span = ALL
    if kind == SLIDING:
        span = Span(window=keys.integer("sliding_window"))
    elif kind == CHUNKED:
        span = Span(chunk=keys.integer("attention_chunk_size"))
    heads, weights, vectors = _heads(keys, family, width, span)
    return _linear(keys, heads, width) if kind == LINEAR else Sized(heads, weights, vectors)


def _heads(keys: Keys, family: Family, width: int, span: Span) -> tuple[Heads, int, int]:
    """Reads attention with K and V of its own; see `Sized` for what is returned."""
    H = keys.integer("num_attention_heads", "n_head")
    K = _kv_heads(keys, H)
    D = keys.integer_or_none("head_dim")
    if D is None and width % H:
        raise LedgerError(
            f"{keys.where}: has no head_dim, and num_attention_heads = {H} does not divide "
            f"hidden_size = {width}"
        )
    D = D or width // H
    named = keys.flag("attention_bias")
    qkv_bias = named if family.qkv_bias is None else family.qkv_bias
    o_bias = named if family.o_bias is None else family.o_bias
    weights = width * D * (H * (3 if family.output_gate else 2) + 2 * K)
    vectors = (H + 2 * K) * D * qkv_bias + width * o_bias
    vectors += 2 * D * family.qk_norm + 4 * D * keys.flag("qk_layernorm") + H * family.sinks
    heads = Heads(query_heads=H, kv_heads=K, key_dim=D, value_dim=D, span=span)
    return heads, weights, vectors


def _kv_heads(keys: Keys, H: int) -> int:
    K = keys.integer_or_none("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if keys.given("multi_query") and not keys.flag("new_decoder_architecture"):
        one = keys.flag("multi_query")
        if K not in (None, 1 if one else H, H):  # Falcon's files have multi_query and H
            raise keys.error("multi_query", f"contradicts num_kv_heads = {K}")
        return 1 if one else H
    if K is None:
        keys.note(f"num_key_value_heads is missing: taken as {H}, as in multi-head attention")
        K = H
    if H % K:
        raise LedgerError(
            f"{keys.where}: num_key_value_heads = {K} does not divide num_attention_heads = {H}"
        )
    return K


def _latent(keys: Keys, width: int) -> Sized:
    """Reads multi-head latent attention, as in DeepSeek V2."""
    H = keys.integer("num_attention_heads")
    keys.integer_or_none("num_key_value_heads")  # in the files, without a meaning
    rank, rope = keys.integer("kv_lora_rank"), keys.integer("qk_rope_head_dim")
    nope, value = keys.integer("qk_nope_head_dim"), keys.integer("v_head_dim")
    head_dim = keys.integer_or_none("head_dim", "qk_head_dim")
    if head_dim not in (None, rope, nope + rope):
        raise keys.error("head_dim", f"is neither {rope} nor {nope + rope}", head_dim)
    q_rank = keys.integer_or_zero("q_lora_rank", missing="q is taken as projected in one step")
    bias = keys.flag("attention_bias")
    weights = width * (rank + rope) + rank * H * (nope + value) + H * value * width
    vectors = rank + (rank + rope + width) * bias
    if not q_rank:
        weights += width * H * (nope + rope)
    else:
        weights += width * q_rank + q_rank * H * (nope + rope)
        vectors += q_rank * (1 + bias)
    latent = Latent(query_heads=H, rank=rank, rope_dim=rope, nope_dim=nope, value_dim=value)
    return Sized(latent, weights, vectors)


def _linear(keys: Keys, heads: Heads, width: int) -> Sized:
    """Reads a constant state: a gated delta net (Qwen3-Next) or lightning attention (MiniMax)."""
    if keys.given("attn_type_list"):
        H, D = heads.query_heads, heads.key_dim
        return Sized(State(heads=H, values=H * D * D, conv_values=0), 5 * width * H * D, H * D)
    nk, nv = keys.integer("linear_num_key_heads"), keys.integer("linear_num_value_heads")
    dk, dv = keys.integer("linear_key_head_dim"), keys.integer("linear_value_head_dim")
    kernel = keys.integer("linear_conv_kernel_dim")
    if nv % nk:
        raise keys.error("linear_num_value_heads", f"is no multiple of {nk} key heads")
    conv = 2 * nk * dk + nv * dv
    weights = width * (2 * nk * dk + 3 * nv * dv + 2 * nv) + conv * kernel
    state = State(heads=nv, values=nv * dk * dv, conv_values=conv * (kernel - 1))
    return Sized(state, weights, 2 * nv + dv)
