"""The keys of the config of a model that is to run, in `config.json` and GGUF files alike.

Each key of the file is one of
  1. read: its value goes into the `ModelConfig`, or must be the only value that is implemented;
  2. harmless: on a list of keys that cannot change the logits (names, dtypes, sampling defaults);
  3. neutral: on a list of keys, with the one value that does not change the logits;
  4. off: any other key whose value is null, false, zero or empty.
Every other key is refused.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxkv.config_keys import ConfigKeys
from jaxkv.models.errors import ModelError


class Keys(ConfigKeys):
    """Typed access to the keys of a file; raises ModelError."""

    error_type = ModelError

    def number(self, key: str) -> float:
        """Returns a number above zero.

        Raises:
          ModelError: the key is missing, or has another value.
        """
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "must be a number above 0")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Returns the same; None if the key is null or missing."""
        return None if self.get(key) is None else self.number(key)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """Returns an object; None if it is null, missing or empty.

        Raises:
          ModelError: the key has another value.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return value or None

    def refuse_unread(
        self, *, harmless: Collection[str] = (), neutral: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ModelError for the first key that the rule of this module refuses."""
        neutral = neutral or {}
        for key, value in self.unread(harmless).items():
            if key in neutral:
                if value is not None and value != neutral[key]:
                    raise self.error(key, f"is not supported; only {neutral[key]!r} is")
            elif value:
                raise self.error(key, "is not a key this package knows, and may change the maths")
