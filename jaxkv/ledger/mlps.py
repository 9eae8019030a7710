"""The MLPs of a config's layers: dense, or routed experts.

Each reader takes the keys, E and the number of layers, and returns the MLP of each layer.
"""

from collections.abc import Callable

from jaxkv.ledger.keys import Keys
from jaxkv.ledger.shapes import Mlp

Reader = Callable[[Keys, int, int], list[Mlp]]


def _gated(width: int, inner: int) -> int:
    return 3 * width * inner


def dense(*, gated: bool = True, bias: bool | None = None) -> Reader:
    """Returns a reader of dense MLPs; if `bias` is None, `mlp_bias` says whether they have one."""

    def read(keys: Keys, width: int, count: int) -> list[Mlp]:
        if gated:
            F = keys.integer("intermediate_size")
        else:
            names = "intermediate_size", "n_inner", "ffn_hidden_size"
            F = keys.integer_or(4 * width, "four times the width", *names)
        has_bias = keys.flag("mlp_bias") if bias is None else bias
        vectors = (F * (2 if gated else 1) + width) * has_bias
        return [Mlp(weights=(3 if gated else 2) * width * F, vectors=vectors)] * count

    return read


LLAMA = dense()


def _routed(
    keys: Keys, width: int, *, inner: int, always: int = 0, vectors: int = 0, bias: bool = False
) -> Mlp:
    """Returns routed experts; `always` counts the weights, besides the router, that every token
    uses."""
    experts = keys.integer("num_local_experts", "num_experts", "n_routed_experts")
    chosen = keys.integer("num_experts_per_tok", "experts_per_token")
    if chosen > experts:
        raise keys.error("num_experts_per_tok", f"is more than there are experts, {experts}")
    return Mlp(
        weights=width * experts + always,
        vectors=vectors + experts * bias,
        experts=experts,
        experts_per_token=chosen,
        expert_weights=_gated(width, inner),
        expert_vectors=(2 * inner + width) * bias,
    )


def mixtral(keys: Keys, width: int, count: int) -> list[Mlp]:
    """Mixtral: every layer has experts, all of the same size."""
    return [_routed(keys, width, inner=keys.integer("intermediate_size"))] * count


def gpt_oss(keys: Keys, width: int, count: int) -> list[Mlp]:
    """gpt-oss: the same with biases."""
    return [_routed(keys, width, inner=keys.integer("intermediate_size"), bias=True)] * count


def qwen_moe(keys: Keys, width: int, count: int) -> list[Mlp]:
    """Qwen: every n-th layer has experts, and in some models a shared expert."""
    shared = keys.integer_or_zero("shared_expert_intermediate_size")
    always = _gated(width, shared) + width if shared else 0  # the shared expert has a gate
    sparse = _routed(keys, width, inner=keys.integer("moe_intermediate_size"), always=always)
    step = keys.integer_or_zero("decoder_sparse_step") or 1
    only = keys.layers("mlp_only_layers", count)
    has_experts = [i not in only and (i + 1) % step == 0 for i in range(count)]
    keys.get("intermediate_size")  # given even if no layer is dense
    if all(has_experts):
        return [sparse] * count
    dense = Mlp(weights=_gated(width, keys.integer("intermediate_size")))
    return [sparse if experts else dense for experts in has_experts]


def deepseek(keys: Keys, width: int, count: int) -> list[Mlp]:
    """DeepSeek: the first layers are dense, the others have shared and routed experts."""
    dense = Mlp(weights=_gated(width, keys.integer("intermediate_size")))
    first = keys.integer_or_zero("first_k_dense_replace", missing="no layer is taken as dense")
    if first > count:
        raise keys.error("first_k_dense_replace", f"is more than there are layers, {count}")
    step = keys.integer_or_zero("moe_layer_freq") or 1
    inner = keys.integer("moe_intermediate_size")
    shared = keys.integer_or_zero("n_shared_experts", missing="taken as none")
    # V3's router has a correction per expert.
    corrected = keys.get("topk_method") == "noaux_tc"
    vectors = keys.integer("n_routed_experts") if corrected else 0
    always = _gated(width, shared * inner)
    sparse = _routed(keys, width, inner=inner, always=always, vectors=vectors)
    if keys.integer_or_zero("num_nextn_predict_layers"):
        keys.note("its layers for multi-token prediction are not counted")
    return [sparse if i >= first and i % step == 0 else dense for i in range(count)]


def llama4(keys: Keys, width: int, count: int) -> list[Mlp]:
    """Llama 4: every n-th layer has experts, one of them shared."""
    inner = keys.integer("intermediate_size")
    dense = Mlp(weights=_gated(width, keys.integer("intermediate_size_mlp")))
    sparse = _routed(keys, width, inner=inner, always=_gated(width, inner))
    step = keys.integer("interleave_moe_layer_step")
    every = {i for i in range(count) if (i + 1) % step == 0}
    which = keys.layers("moe_layers", count) or every
    return [sparse if i in which else dense for i in range(count)]


def gemma3n(keys: Keys, width: int, count: int) -> list[Mlp]:
    """Gemma 3n: dense, with LAuReL, AltUp's router and the gates of the per-layer input."""
    listed = isinstance(keys.get("intermediate_size"), list)
    sizes = keys.integers("intermediate_size", count) if listed else None
    sizes = sizes or [keys.integer("intermediate_size")] * count
    rank, dim = keys.integer("laurel_rank"), keys.integer("hidden_size_per_layer_input")
    copies = keys.integer("altup_num_inputs")
    more = 2 * width * rank + 2 * width * dim + width * copies + copies**3 + copies**2
    return [Mlp(weights=_gated(width, F) + more, vectors=4 * width) for F in sizes]
