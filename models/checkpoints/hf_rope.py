"""The rotary embedding keys of a `config.json`, in the forms that transformers 4 and 5 write.

Version 4 writes `rope_theta` and `rope_scaling` among the other keys, and `rope_local_base_freq`
for the sliding layers of Gemma 3. Version 5 writes one `rope_parameters`, either for all layers or
with one object per layer type. Defaults are those of `transformers.modeling_rope_utils` 5.24.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxkv.config_keys import FULL, SLIDING
from jaxkv.models.checkpoints.keys import Keys
from jaxkv.models.config import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from jaxkv.models.errors import ModelError

_LAYER_TYPES = frozenset({FULL, SLIDING})
# Parameters of some kind of scaling. Those of a kind other than `rope_type` have no effect.
_SCALING_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
} | {"low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}


def ropes_from_hf(keys: Keys, where: str, *, two_bases: bool) -> dict[str, RopeConfig]:
    """Reads the rotary embedding of full and of sliding layers.

    Args:
      keys: keys of the config; `rope_theta` must have a default.
      where: text that error messages start with.
      two_bases: whether sliding layers have a base of their own, as in Gemma 3; in the form of
        version 4 they are never scaled.

    Returns:
      One RopeConfig for `full_attention`, one for `sliding_attention`.
    """
    scaling, parameters = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    theta = keys.number("rope_theta")
    stated = keys.integer("max_position_embeddings")
    limits = (keys.integer_or_none("original_max_position_embeddings") or stated, stated)
    local_theta = keys.number("rope_local_base_freq") if two_bases else theta
    if parameters is not None and scaling is not None:
        raise ModelError(f"{where}: has both rope_parameters and rope_scaling; remove one")
    if parameters is not None and parameters.keys() <= _LAYER_TYPES:
        return {
            kind: _rope(parameters.get(kind) or {}, f"{where}: rope_parameters.{kind}", t, limits)
            for kind, t in ((FULL, theta), (SLIDING, local_theta))
        }
    if parameters is not None and two_bases:
        raise keys.error("rope_parameters", "must have one object per layer type")
    name = "rope_scaling" if parameters is None else "rope_parameters"
    rope = _rope(parameters or scaling or {}, f"{where}: {name}", theta, limits)
    return {FULL: rope, SLIDING: RopeConfig(theta=local_theta) if two_bases else rope}


def longest_sequence(max_positions: int, ropes: Mapping[str, RopeConfig]) -> int:
    """Returns `max_positions`, or the length to which YaRN stretches the trained one if larger."""
    stretched = (
        int(scaling.factor * scaling.original_max_positions)
        for scaling in (rope.scaling for rope in ropes.values())
        if isinstance(scaling, YarnScaling)
    )
    return max(max_positions, *stretched, 0)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's factor on the rotations, 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _rope(
    raw: Mapping[str, Any], where: str, default_theta: float, limits: tuple[int, int]
) -> RopeConfig:
    """Reads one set of parameters; `limits` are the trained and the stated longest sequence."""
    trained, stated = limits
    keys = Keys(
        raw,
        where,
        defaults={"rope_theta": default_theta, "original_max_position_embeddings": trained},
    )
    theta = keys.number("rope_theta")
    old_kind = keys.get("type")
    kind = keys.get("rope_type") or old_kind or "default"
    scaling: RopeScaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(factor=keys.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=keys.number("factor"),
                low_freq_factor=keys.number("low_freq_factor"),
                high_freq_factor=keys.number("high_freq_factor"),
                original_max_positions=keys.integer("original_max_position_embeddings"),
            )
        case "yarn":
            scaling = _yarn(keys, stated)
        case _:
            name = "rope_type" if "rope_type" in raw else "type"
            raise keys.error(name, "is not supported; default, linear, llama3 and yarn are")
    keys.refuse_unread(harmless=_SCALING_KEYS, neutral={"partial_rotary_factor": 1.0})
    return RopeConfig(theta=theta, scaling=scaling)


def _yarn(keys: Keys, stated: int) -> YarnScaling:
    original = keys.integer("original_max_position_embeddings")
    factor = keys.number_or_none("factor") or stated / original
    attention_factor = keys.number_or_none("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_magnitude(factor)
        # DeepSeek's pair. Only one of them, or a zero, has no effect.
        over, under = keys.get("mscale"), keys.get("mscale_all_dim")
        if over and under:
            over, under = keys.number("mscale"), keys.number("mscale_all_dim")
            attention_factor = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=keys.number_or_none("beta_fast") or 32.0,
        beta_slow=keys.number_or_none("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=keys.get("truncate") is None or keys.flag("truncate"),
    )
