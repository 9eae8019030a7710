"""The keys of one `config.json`, read by name, with notes on what was assumed or left out.

A missing key that a figure needs is refused, or gets a default with a note. A key that was not read
is one of

    harmless     on a list: it cannot change bytes or multiply-adds
    off          null, false, zero, empty, or a list of such
    suspicious   its name has a word such as `kv`, `window` or `expert` in it: refused
    unknown      any other: a note names it

What the keys mean is in `families`.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxkv import config_keys
from jaxkv.config_keys import LARGEST, ConfigKeys
from jaxkv.ledger.errors import LedgerError
from jaxkv.printable import shortened

_SUSPICIOUS = re.compile(
    "kv|key|value|head|window|slid|cache|shar|latent|rank|state|ssm|mamba|conv|linear|chunk|layer|"
    "expert|moe|attn|attention|compress|index|block|group|hybrid|recurr|sparse|topk|dim|size"
)

_MADE = """
auto_map quantization_config attn_pdrop embd_pdrop resid_pdrop embed_dropout mlp_dropout
classifier_dropout eos_token_index ep_size output_router_logits router_aux_loss_coef
router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux for_llm_compressor
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
use_mamba_kernels torchscript max_new_tokens
"""
_FUNCTIONS = """
hidden_act hidden_activation activation_function swiglu_limit rms_norm_eps layer_norm_eps
layer_norm_epsilon norm_eps norm_epsilon rope_theta rope_scaling rope_parameters
rope_local_base_freq rope_interleave rotary_pct rotary_dim partial_rotary_factor
initial_context_length original_max_position_embeddings query_pre_attn_scalar
attn_logit_softcapping final_logit_softcapping scale_attn_weights
scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attn_scale attn_temperature_tuning
floor_scale use_qk_norm no_rope_layer_interval norm_topk_prob scoring_func topk_method n_group
topk_group routed_scaling_factor alibi parallel_attn apply_residual_connection_post_layernorm
use_bidirectional_attention activation_sparsity_pattern altup_active_idx altup_coef_clip
altup_correct_scale altup_lr_multiplier postnorm layernorm_full_attention_alpha
layernorm_full_attention_beta layernorm_linear_attention_alpha layernorm_linear_attention_beta
layernorm_mlp_alpha layernorm_mlp_beta shared_moe_mode full_attn_mod interpolate_factor
"""
_TOWERS = """
audio_config video_token_id boa_token_id eoa_token_id audio_token_id audio_soft_tokens_per_image
vision_soft_tokens_per_image vision_feature_layer vision_start_token_id vision_end_token_id
multimodal_projector_bias projector_hidden_act spatial_merge_size tie_word_embeddings
"""
# How a file was made and stored, and functions that neither keep nor multiply anything.
HARMLESS = config_keys.HARMLESS | frozenset((_MADE + _FUNCTIONS).split())
# The same for the object around a text model.
OUTER = HARMLESS | config_keys.VISION | frozenset(_TOWERS.split())


class Keys(ConfigKeys):
    """Typed access to a config; raises LedgerError.

    Attributes:
      notes: what was assumed so far.
    """

    error_type = LedgerError

    def __init__(self, raw: Mapping[str, Any], where: str):
        super().__init__(raw, where)
        self.notes: list[str] = []

    def expect(self, defaults: Mapping[str, Any]) -> None:
        """Sets the values of keys that the files of a family may leave out."""
        self._defaults = defaults

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def get(self, *names: str) -> Any:
        """Returns the value of a key, see `ConfigKeys.get`; notes a default."""
        value = super().get(*names)
        if value is not None and not any(map(self.given, names)):
            self.note(f"{names[0]} is missing: taken as {value:,}, the family's own")
        return value

    def integer_or(self, default: int, because: str, *names: str) -> int:
        """Returns a whole number above zero; `default` if the key is null or missing, with a note
        that ends in `because`."""
        if self.get(*names) is not None:
            return self.integer(*names)
        self.note(f"{names[0]} is missing: taken as {default:,}, {because}")
        return default

    def integer_or_zero(self, *names: str, missing: str = "") -> int:
        """Returns a whole number; 0 if the key is null, false, zero or missing. If it is missing,
        `missing` ends a note."""
        if missing and not any(name in self._values or name in self._defaults for name in names):
            self.note(f"{names[0]} is missing: {missing}")
        return self.integer(*names) if self.get(*names) else 0

    def text(self, name: str) -> str | None:
        """Returns a string; None if the key is null or missing.

        Raises:
          LedgerError: the key has another value.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def strings(self, name: str, count: int) -> list[str] | None:
        """Returns a list with a string for each of `count` layers; None if the key is null or
        missing.

        Raises:
          LedgerError: the key has another value, or a list of another length.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.error(name, "must be a list of strings")
        self._check_length(name, value, count)
        return value

    def integers(self, name: str, count: int | None = None) -> list[int] | None:
        """Returns a list of whole numbers, one for each of `count` layers; None if the key is null,
        missing or empty.

        Raises:
          LedgerError: the key has another value, or a list of another length.
        """
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, list) or not all(
            type(x) is int and 0 <= x <= LARGEST for x in value
        ):
            raise self.error(name, "must be a list of whole numbers")
        self._check_length(name, value, count)
        return value

    def layers(self, name: str, count: int) -> set[int]:
        """Returns the numbers of layers that a key lists; empty if it is null or missing.

        Raises:
          LedgerError: the key has another value, or there is no such layer.
        """
        found = set(self.integers(name) or ())
        if found and max(found) >= count:
            problem = f"is none of {count} layers, 0 to {count - 1}"
            raise self.error(name, problem, max(found))
        return found

    def _check_length(self, name: str, value: list, count: int | None) -> None:
        if count is not None and len(value) != count:
            raise LedgerError(
                f"{self.where}: {name} lists {len(value)} layers, num_hidden_layers is {count}"
            )

    def finish(self, harmless: Collection[str]) -> tuple[str, ...]:
        """Returns the notes, with a note on the keys that were not read.

        Raises:
          LedgerError: one of these keys may change the memory.
        """
        unread = [key for key, value in self.unread(harmless).items() if not _is_off(value)]
        for key in unread:
            if _SUSPICIOUS.search(key.lower()):
                raise self.error(key, "is not known here, and may change the memory")
        if unread:
            self.note(f"not known, and left out of account: {shortened(', '.join(unread))}")
        return tuple(self.notes)


def _is_off(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else not value
