"""The keys of one config file, read once each, so that a key nobody reads can be refused by name.

The rule, for `config.json` and GGUF alike. A key is one of
  1. read: its value goes into the `ModelConfig`, or must be the one value that is implemented;
  2. harmless: on a list of keys that cannot change the logits (names, dtypes, sampling defaults);
  3. neutral: on a list of keys with the one value that leaves the maths as it is;
  4. off: any other key whose value is null, false, zero or empty;
and everything else raises: a variant of a known architecture announces itself by a new key.

Not here: which keys a file has (`hf_config`, `gguf_config`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxkv.models.errors import ModelError


class Keys:
    """Typed access to a mapping of keys; remembers which were asked for.

    Args:
      values: of the file.
      where: what an error message starts with: the file, and the object in it.
      prefix: of every key, for error messages alone.
      defaults: values of keys that the file may leave out. A null in the file is not replaced.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ):
        self._values = values
        self._where = where
        self._prefix = prefix
        self._defaults = defaults or {}
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it is; None where it is null, or missing without a default."""
        self._read.add(key)
        return self._values.get(key, self._defaults.get(key))

    def integer(self, key: str, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"must be a whole number of at least {least}")
        return value

    def integer_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """A number above zero."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "must be a number above 0")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """A boolean; null is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return bool(value)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object; None where it is null or empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return value or None

    def refuse_unread(
        self, *, harmless: Collection[str] = (), neutral: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ModelError for the first key that the rule above does not let pass."""
        neutral = neutral or {}
        for key, value in self._values.items():
            if key in self._read or key in harmless:
                continue
            if key in neutral:
                if value is not None and value != neutral[key]:
                    raise self.error(key, f"is not supported; only {neutral[key]!r} is")
            elif value:
                raise self.error(key, "is not a key this package knows, and may change the maths")

    def error(self, key: str, problem: str) -> ModelError:
        """A ModelError that names the key and its value, shortened to fit a line."""
        text = repr(self._values.get(key, self._defaults.get(key)))
        shown = text if len(text) <= 120 else text[:117] + "..."
        return ModelError(f"{self._where}: {self._prefix}{key} = {shown} {problem}")

    def _required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._where}: has no {self._prefix}{key}")
        return value
