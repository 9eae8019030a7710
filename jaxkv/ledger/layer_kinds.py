"""The kind of attention of each layer: as `layer_types` lists it, or by the rule of a family.

A rule takes the keys and the number of layers, and returns the kind of each layer.
"""

from collections.abc import Callable, Sequence

from jaxkv.config_keys import FULL, SLIDING
from jaxkv.ledger.errors import LedgerError
from jaxkv.ledger.keys import Keys

CHUNKED, LINEAR = "chunked_attention", "linear_attention"
KINDS = (FULL, SLIDING, CHUNKED, LINEAR)

Rule = Callable[[Keys, int], list[str]]

# Keys that say which layers are of which kind. If `layer_types` is given too, they must agree.
_RULES = (
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "full_attention_interval",
    "attn_type_list",
    "no_rope_layers",
)
_SWITCHES = ("use_sliding_window", "max_window_layers", "sliding_window", "attention_chunk_size")


def layer_kinds(keys: Keys, rule: Rule, count: int) -> list[str]:
    """Returns the kind of each layer.

    Raises:
      LedgerError: `layer_types` has an unknown kind, or another key says otherwise.
    """
    listed = keys.strings("layer_types", count)
    if listed is None:
        return rule(keys, count)
    if unknown := [kind for kind in listed if kind not in KINDS]:
        raise keys.error("layer_types", f"is none of {', '.join(KINDS)}", unknown[0])
    names = _RULES if rule is not llama4 else (*_RULES, "no_rope_layer_interval")
    given = [name for name in names if keys.given(name)]
    other = given[0] if given and listed != rule(keys, count) else _switched(keys, rule, listed)
    if other is not None:
        raise LedgerError(f"{keys.where}: layer_types and {other} contradict each other")
    for name in filter(keys.given, (*_RULES, *_SWITCHES)):
        keys.get(name)  # it agrees
    return listed


def _switched(keys: Keys, rule: Rule, listed: Sequence[str]) -> str | None:
    """Returns a key that switches on what no listed layer has, or off what one has; else None."""
    on = keys.flag("use_sliding_window", default=rule not in (qwen, smollm3))
    window = keys.given("sliding_window") and keys.integer_or_zero("sliding_window") > 0
    if SLIDING in listed and not on:
        given = keys.given("use_sliding_window")
        return "use_sliding_window" if given else "a missing use_sliding_window, which is false,"
    if on and keys.given("use_sliding_window") and keys.given("max_window_layers"):
        if listed != qwen(keys, len(listed)):
            return "max_window_layers"
    elif on and window and SLIDING not in listed:
        return "sliding_window"
    chunk = "attention_chunk_size"
    chunked = keys.given(chunk) and keys.integer_or_zero(chunk) > 0
    return chunk if chunked and CHUNKED not in listed else None


def shared_sources(keys: Keys, kinds: Sequence[str]) -> dict[int, int]:
    """Returns, for each layer that reads the K and V of another layer, the number of that layer.

    These are the last layers of Gemma 3n, which share with the last layer of their kind that has
    its own K and V, or all layers but each n-th one (CLA, arXiv 2405.12981).

    Raises:
      LedgerError: there is no layer to share with, or keys contradict each other.
    """
    count = len(kinds)
    last = keys.integer_or_zero("num_kv_shared_layers")
    factor = keys.integer_or_none("cla_share_factor")
    crosses = keys.flag("use_cla", default=factor is not None)
    if crosses and factor is None:
        raise LedgerError(f"{keys.where}: has no cla_share_factor, which use_cla needs")
    if crosses and last:
        raise LedgerError(f"{keys.where}: num_kv_shared_layers and use_cla contradict each other")
    if crosses and factor is not None:
        sources = {i: i - i % factor for i in range(count) if i % factor}
    elif last:
        alike = {kinds[i]: i for i in range(count - last)}
        sources = {i: alike.get(kinds[i], -1) for i in range(max(0, count - last), count)}
    else:
        return {}
    for layer, source in sources.items():
        if source < 0 or kinds[layer] != kinds[source] or kinds[layer] == LINEAR:
            name = "cla_share_factor" if crosses else "num_kv_shared_layers"
            raise keys.error(name, f"leaves layer {layer} no layer of its kind to share with")
    return sources


def all_full(keys: Keys, count: int) -> list[str]:
    """Every layer sees all tokens."""
    return [FULL] * count


def windowed(keys: Keys, count: int) -> list[str]:
    """Every layer slides if there is a window that is not switched off."""
    window = keys.integer_or_zero("sliding_window")
    return [SLIDING if window and keys.flag("use_sliding_window", True) else FULL] * count


def qwen(keys: Keys, count: int) -> list[str]:
    """A window for the layers from `max_window_layers` on, if it is switched on."""
    first, window = keys.get("max_window_layers"), keys.integer_or_zero("sliding_window")
    if not keys.flag("use_sliding_window"):
        return [FULL] * count
    if not window or type(first) is not int or first < 0:
        raise LedgerError(
            f"{keys.where}: use_sliding_window needs sliding_window and max_window_layers"
        )
    return [SLIDING if i >= first else FULL for i in range(count)]


def smollm3(keys: Keys, count: int) -> list[str]:
    """The same as Qwen's. Every fourth layer has no RoPE, which does not change what it sees."""
    _has_rope(keys, count)
    return qwen(keys, count)


def alternating(keys: Keys, count: int) -> list[str]:
    """Layers 0, 2, 4 and so on slide."""
    keys.integer("sliding_window")
    return [FULL if i % 2 else SLIDING for i in range(count)]


def patterned(default: int) -> Rule:
    """Returns a rule: every n-th layer is full, the others slide; `default` is n if no key says."""

    def kinds(keys: Keys, count: int) -> list[str]:
        names = "sliding_window_pattern", "_sliding_window_pattern"
        n = keys.integer_or(default, "the family's own", *names)
        return [FULL if (i + 1) % n == 0 else SLIDING for i in range(count)]

    return kinds


def every_fourth_full(keys: Keys, count: int) -> list[str]:
    """Every n-th layer is full, the others are linear; n is 4 if no key says."""
    n = keys.integer_or(4, "the family's own", "full_attention_interval")
    return [FULL if (i + 1) % n == 0 else LINEAR for i in range(count)]


def llama4(keys: Keys, count: int) -> list[str]:
    """Layers with RoPE have chunks: those with 1 in `no_rope_layers`, or all but each n-th one."""
    n = keys.integer("no_rope_layer_interval") if keys.given("no_rope_layer_interval") else 4
    every = [int((i + 1) % n != 0) for i in range(count)]
    listed = _has_rope(keys, count)
    if listed is not None and keys.given("no_rope_layer_interval") and listed != every:
        raise LedgerError(
            f"{keys.where}: no_rope_layers and no_rope_layer_interval = {n} contradict each other"
        )
    chunked = keys.integer_or_zero("attention_chunk_size") > 0
    return [CHUNKED if chunked and rope else FULL for rope in listed or every]


def _has_rope(keys: Keys, count: int) -> list[int] | None:
    """Returns `no_rope_layers`, 1 for a layer with RoPE; None if it is missing or empty."""
    listed = keys.integers("no_rope_layers", count)
    if listed is not None and set(listed) - {0, 1}:
        raise keys.error("no_rope_layers", "has a value that is neither 0 nor 1")
    return listed


def minimax(keys: Keys, count: int) -> list[str]:
    """A layer is full if `attn_type_list` has 1 for it, else linear."""
    keys.get("block_size")  # tokens that are computed together: neither kept nor multiplied more
    kinds = keys.integers("attn_type_list", count)
    if kinds is None:
        raise LedgerError(f"{keys.where}: has no attn_type_list")
    if set(kinds) - {0, 1}:
        raise keys.error("attn_type_list", "has a kind that is neither 0 nor 1")
    return [FULL if full else LINEAR for full in kinds]
