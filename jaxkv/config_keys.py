"""The keys of a model's config file: typed access for every reader, and what the readers share.

A reader asks for each key that it knows and can then refuse, by name, a key that was not asked for.
A variant of a known architecture has a new key, so it is never read as the plain architecture.
`jaxkv.models.checkpoints` reads a config to run a model, `jaxkv.ledger` to count its bytes.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from jaxkv.printable import shortened

LARGEST = 1 << 40  # of any whole number in a config

FULL, SLIDING = "full_attention", "sliding_attention"  # values in `layer_types`

_MADE = """
architectures model_type name_or_path transformers_version is_llama_config torch_dtype dtype
use_cache cache_implementation transformers.js_config initializer_range attention_dropout
hidden_dropout pretraining_tp is_decoder unsloth_fixed unsloth_version tokenizer_class
chunk_size_feed_forward bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
id2label label2id num_labels problem_type finetuning_task task_specific_params return_dict
output_hidden_states output_attentions
"""
_SAMPLING = """
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size num_return_sequences
"""
_VISION = """
vision_config mm_tokens_per_image image_token_index image_token_id boi_token_index eoi_token_index
boi_token_id eoi_token_id
"""
# Keys that change neither logits nor memory: how the model was trained and the file was made, and
# defaults of sampling.
HARMLESS = frozenset((_MADE + _SAMPLING).split())
# Keys around the text model of a model that also sees images.
VISION = frozenset(_VISION.split())
# By `model_type`, what transformers takes for the sizes that a file may leave out.
SIZES: Mapping[str, dict[str, int]] = MappingProxyType(
    {
        "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
        "qwen2": {"num_key_value_heads": 32},
        "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
        "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        "gemma3_text": {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    }
)


class ConfigKeys:
    """Typed access to the keys of one object of a file. It remembers which keys were read.

    A subclass says which exception it raises (`error_type`), and what to do with unread keys.

    Attributes:
      where: the file and the object in it; every error message starts with it.
    """

    error_type: type[ValueError] = ValueError

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ):
        """Takes the keys of an object.

        Args:
          values: the object.
          where: see the class.
          prefix: what precedes every key in the file, for error messages.
          defaults: values of keys that the file may leave out. They do not replace a null.
        """
        self.where = where
        self._values = values
        self._prefix = prefix
        self._defaults: Mapping[str, Any] = defaults or {}
        self._read: set[str] = set()

    def given(self, name: str) -> bool:
        """Returns whether the file has a value other than null for a key."""
        return self._values.get(name) is not None

    def get(self, *names: str) -> Any:
        """Returns the value of a key as it is; None if it is null, or missing without a default.

        Args:
          names: the names that the key has in different files, the usual one first.

        Raises:
          ValueError: two of the names have different values.
        """
        self._read.update(names)
        found = {name: self._values[name] for name in names if self.given(name)}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            pairs = " and ".join(f"{name} = {_shown(value)}" for name, value in found.items())
            raise self.error_type(f"{self.where}: {pairs} contradict each other")
        if values:
            return values[0]
        return self._defaults.get(names[0]) if names[0] not in self._values else None

    def required(self, *names: str) -> Any:
        """Returns the same.

        Raises:
          ValueError: the value is None.
        """
        value = self.get(*names)
        if value is None:
            raise self.error_type(f"{self.where}: has no {self._prefix}{names[0]}")
        return value

    def integer(self, *names: str, least: int = 1) -> int:
        """Returns a whole number from `least` to LARGEST.

        Raises:
          ValueError: the key is missing, or has another value.
        """
        value = self.required(*names)
        if type(value) is not int or not least <= value <= LARGEST:
            name = next(filter(self.given, names), names[0])
            raise self.error(name, f"must be a whole number from {least} to 2^40")
        return value

    def integer_or_none(self, *names: str) -> int | None:
        """Returns the same; None if the key is null or missing."""
        return None if self.get(*names) is None else self.integer(*names)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a boolean, or `default` if the key is null or missing.

        Raises:
          ValueError: the key has another value.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return default if value is None else value

    def unread(self, harmless: Collection[str]) -> dict[str, Any]:
        """Returns the keys that were not read and are not harmless, with their values. Keys that
        begin with an underscore are bookkeeping of transformers, and left out."""
        return {
            key: value
            for key, value in self._values.items()
            if key not in self._read and key not in harmless and not key.startswith("_")
        }

    def error(self, name: str, problem: str, value: Any = None) -> ValueError:
        """Returns an error that names a key and its value, or the part of it that is wrong."""
        if value is None:
            value = self._values.get(name, self._defaults.get(name))
        shown = f"{self._prefix}{shortened(name)} = {_shown(value)}"
        return self.error_type(f"{self.where}: {shown} {problem}")


def _shown(value: Any) -> str:
    return shortened(repr(value))
