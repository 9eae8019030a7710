"""The keys of one `config.json`, read by name; what was assumed or left out is noted.

A key that a figure needs and that is missing is refused, or gets a default with a note. Of keys
that nobody read, one whose name tells of memory is refused, and another one noted:

    harmless     on a list: cannot change bytes or multiply-adds
    off          null, false, zero, empty, or a list of such
    suspicious   its name has a word such as `kv`, `window` or `expert` in it: refused
    unknown      any other: a note names it

Not here: what the keys mean (`families`).
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxkv.ledger.errors import LedgerError

_SUSPICIOUS = re.compile(
    "kv|key|value|head|window|slid|cache|shar|latent|rank|state|ssm|mamba|conv|linear|chunk|layer|"
    "expert|moe|attn|attention|compress|index|block|group|hybrid|recurr|sparse|topk|dim|size"
)
LARGEST = 1 << 40

_MADE = """
architectures model_type name_or_path transformers_version torch_dtype dtype use_cache auto_map
cache_implementation transformers.js_config quantization_config pretraining_tp initializer_range
attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop embed_dropout mlp_dropout
classifier_dropout bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
eos_token_index is_decoder is_llama_config id2label label2id num_labels tokenizer_class
task_specific_params unsloth_fixed unsloth_version ep_size output_router_logits
router_aux_loss_coef router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux
for_llm_compressor output_hidden_states output_attentions return_dict chunk_size_feed_forward
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
use_mamba_kernels torchscript problem_type finetuning_task temperature top_k top_p max_length
do_sample max_new_tokens repetition_penalty
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
vision_config audio_config mm_tokens_per_image image_token_index image_token_id video_token_id
boi_token_index eoi_token_index boi_token_id eoi_token_id boa_token_id eoa_token_id
audio_token_id audio_soft_tokens_per_image vision_soft_tokens_per_image vision_feature_layer
vision_start_token_id vision_end_token_id multimodal_projector_bias projector_hidden_act
spatial_merge_size tie_word_embeddings
"""
# How a file was made, stored and tokenised; and functions that keep and multiply nothing more.
HARMLESS = frozenset((_MADE + _FUNCTIONS).split())
OUTER = HARMLESS | frozenset(_TOWERS.split())  # of an object around a text model


class Keys:
    """Typed access to a config; remembers what was asked for.

    Attributes:
      where: what an error message starts with.
      notes: so far.
    """

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.where = where
        self.notes: list[str] = []
        self._raw = raw
        self._defaults: Mapping[str, Any] = {}
        self._read: set[str] = set()

    def expect(self, defaults: Mapping[str, Any]) -> None:
        """Gives values to keys that the family's files may leave out."""
        self._defaults = defaults

    def given(self, name: str) -> bool:
        """Whether the file has a value under a name."""
        return self._raw.get(name) is not None

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def get(self, *names: str) -> Any:
        """The value under one of several names; None where all are null or missing.

        Raises:
          LedgerError: two of the names have different values.
        """
        self._read.update(names)
        found = {name: self._raw[name] for name in names if self._raw.get(name) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            pairs = " and ".join(f"{name} = {shortened(value)}" for name, value in found.items())
            raise LedgerError(f"{self.where}: {pairs} contradict each other")
        if values:
            return values[0]
        default = self._defaults.get(names[0]) if names[0] not in self._raw else None
        if default is not None:
            self.note(f"{names[0]} is missing: taken as {default:,}, the family's own")
        return default

    def integer(self, *names: str, default: int | None = None, because: str = "") -> int:
        """A whole number above zero.

        Args:
          names: of the key, the usual one first.
          default: of a missing one, with a note.
          because: ends the note.

        Raises:
          LedgerError: it is missing without a default, or no such number.
        """
        value = self.get(*names)
        if value is None:
            if default is None:
                raise LedgerError(f"{self.where}: has no {names[0]}")
            self.note(f"{names[0]} is missing: taken as {default:,}, {because}")
            return default
        if type(value) is not int or not 1 <= value <= LARGEST:
            name = next(filter(self.given, names), names[0])
            raise self.error(name, value, "must be a whole number above 0")
        return value

    def integer_or_none(self, *names: str) -> int | None:
        """The same; None where it is null or missing."""
        return None if self.get(*names) is None else self.integer(*names)

    def integer_or_zero(self, *names: str, missing: str = "") -> int:
        """The same; 0 where it is null, false, zero or missing: `missing` ends a note of that."""
        if missing and not any(name in self._raw or name in self._defaults for name in names):
            self.note(f"{names[0]} is missing: {missing}")
        return self.integer(*names) if self.get(*names) else 0

    def text(self, name: str) -> str | None:
        """A string; None where it is missing.

        Raises:
          LedgerError: it is none.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, value, "must be a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean.

        Raises:
          LedgerError: it is none.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, value, "must be true or false")
        return default if value is None else value

    def strings(self, name: str, count: int) -> list[str] | None:
        """A list with a string for each of `count` layers; None where it is missing.

        Raises:
          LedgerError: it is none, or has another length.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.error(name, value, "must be a list of strings")
        self._check_length(name, value, count)
        return value

    def integers(self, name: str, count: int | None = None) -> list[int] | None:
        """A list of whole numbers, one for each of `count` layers; None where missing or empty.

        Raises:
          LedgerError: it is none, or has another length.
        """
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, list) or not all(
            type(x) is int and 0 <= x <= LARGEST for x in value
        ):
            raise self.error(name, value, "must be a list of whole numbers")
        self._check_length(name, value, count)
        return value

    def layers(self, name: str, count: int) -> set[int]:
        """A list of layers' numbers, below `count`; empty where it is missing.

        Raises:
          LedgerError: it is none, or there is no such layer.
        """
        found = set(self.integers(name) or ())
        if found and max(found) >= count:
            raise self.error(name, max(found), f"is none of {count} layers, 0 to {count - 1}")
        return found

    def _check_length(self, name: str, value: list, count: int | None) -> None:
        if count is not None and len(value) != count:
            raise LedgerError(
                f"{self.where}: {name} lists {len(value)} layers, num_hidden_layers is {count}"
            )

    def error(self, name: str, value: Any, problem: str) -> LedgerError:
        """An error that names a key and its value."""
        return LedgerError(f"{self.where}: {shortened(name)} = {shortened(value)} {problem}")

    def finish(self, harmless: Collection[str]) -> tuple[str, ...]:
        """The notes, with those on keys that nobody read.

        Raises:
          LedgerError: one of these may change the memory.
        """
        unread = [
            key
            for key, value in self._raw.items()
            if not _is_off(value)
            and key not in self._read
            and key not in harmless
            and not key.startswith("_")
        ]
        for key in unread:
            if _SUSPICIOUS.search(key.lower()):
                raise self.error(
                    key, self._raw[key], "is not known here, and may change the memory"
                )
        if unread:
            self.note(f"not known, and left out of account: {shortened(', '.join(unread))}")
        return tuple(self.notes)


def _is_off(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else not value


def printable(text: str) -> str:
    """The text with line ends and characters that a terminal would obey written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(value: Any) -> str:
    """A value in one line of a terminal."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
