"""The bytes that a model's cache and weights take, exactly.

    cache of a sequence   whole pages of every layer, with the parameters of the format and the
                          bfloat16 pages of exact tokens, and the constant states. Pages before a
                          window are freed; a chunk counts as a full one.
    a token               the bytes of its K and V in all layers, with an even share of the
                          parameters of its page
    a device's share      query heads are split evenly. KV heads are split if they divide, else
                          repeated. A latent is on every device.

The bytes equal the `nbytes` of the arrays that `jaxkv.cache` makes (`tests/ledger/test_memory.py`).
Page tables (4 bytes per page), activations and the memory of the framework do not count.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxkv.arith import ceil_div
from jaxkv.kept_pages import num_kept_pages
from jaxkv.kv_format import (
    FORMATS,
    PAGE_SIZES,
    FormatSpec,
    formats_by_layer,
    preferred_page_size,
)
from jaxkv.ledger.errors import LedgerError, check_least
from jaxkv.ledger.shapes import Heads, Latent, Model, Shared, Span, State
from jaxkv.ledger.units import MOST_TOKENS

STATE_BYTES, CONV_BYTES = 4, 2  # bytes per number: states are float32, convolutions bfloat16

# Bits per weight. The blocks of 32 of mxfp4 have a scale of 8 bits; nvfp4 has 8 bits per 16.
WEIGHT_BITS = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "int8": 8, "mxfp4": 4.25, "int4": 4}


class Pages(NamedTuple):
    """The pages of one layer in its format, or its bfloat16 pages of exact tokens.

    Attributes:
      span: which tokens are kept.
      sink_pages: number of first pages that are kept, too.
      exact: whether these are the pages of exact tokens.
      bytes_per_page: on one device.
    """

    span: Span
    sink_pages: int
    exact: bool
    bytes_per_page: int

    def kept(self, num_tokens: int, page_size: int) -> int:
        """Returns the number of pages that a sequence holds before its next token; for chunks, the
        largest number."""
        if self.span.chunk is not None:
            num_tokens = min(num_tokens, self.span.chunk)
        return num_kept_pages(num_tokens, self.span.window, self.sink_pages, page_size)


@dataclass(frozen=True, kw_only=True)
class CacheLedger:
    """The cache of a model in some formats.

    Example:

        ledger = CacheLedger.of(preset("llama-2-7b"), "int8", devices=2)
        ledger.sequence_bytes(32_768)

    Attributes:
      model: the model.
      formats: the format of each layer.
      page_size: P, tokens per page.
      devices: devices that share the cache. All figures are for one of them.
    """

    model: Model
    formats: tuple[FormatSpec, ...]
    page_size: int
    devices: int = 1

    @classmethod
    def of(
        cls,
        model: Model,
        kv_format: str = "bf16",
        *,
        page_size: int | None = None,
        devices: int = 1,
    ) -> "CacheLedger":
        """Makes the ledger of a model.

        Args:
          model: the model.
          kv_format: a format, or a choice of formats by layer (`jaxkv.kv_format`). A layer with
            chunks counts as a layer with a window.
          page_size: P, tokens per page; None takes the size that suits the formats.
          devices: number of devices of a tensor-parallel split.

        Raises:
          LedgerError: a format, page size or split does not fit the model.
          UsageError: there is no such format or layer, or codes do not fill bytes.
        """
        formats = formats_by_layer(kv_format, [layer.slides for layer in model.layers])
        size = preferred_page_size(kv_format) if page_size is None else page_size
        if size not in PAGE_SIZES:
            raise LedgerError(f"page size {size}: must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
        if not 1 <= devices <= 1 << 20:
            raise LedgerError(f"{devices} devices: must be 1 to {1 << 20}")
        for mixer in dict.fromkeys(layer.mixer for layer in model.layers):
            if isinstance(mixer, Heads | Latent) and mixer.query_heads % devices:
                raise LedgerError(
                    f"{mixer.query_heads} query heads do not split over {devices} devices"
                )
        ledger = cls(model=model, formats=formats, page_size=size, devices=devices)
        _ = ledger.pages, ledger.state_bytes  # raise for what does not fit the model
        return ledger

    @cached_property
    def pages(self) -> tuple[Pages, ...]:
        """The pages of each layer that has some, then the pages of exact tokens."""
        own, exact = [], []
        for layer, kv_format in zip(self.model.layers, self.formats, strict=True):
            if isinstance(layer.mixer, Shared | State):
                continue
            span = layer.mixer.span
            own.append(Pages(span, 0, False, self._page_bytes(layer.mixer, kv_format)))
            if (kept := kv_format.exact) is not None:
                size = self._page_bytes(layer.mixer, FORMATS["bf16"])
                exact.append(Pages(Span(window=kept.recent + 1), kept.sink_pages, True, size))
        return (*own, *exact)

    @property
    def bytes_per_token(self) -> int | float:
        """Bytes of a token in all layers, with an even share of the parameters of its page. Pages
        of exact tokens, of which a sequence has a few, and states do not count."""
        whole, rest = divmod(
            sum(one.bytes_per_page for one in self.pages if not one.exact), self.page_size
        )
        return whole + rest / self.page_size if rest else whole

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the constant states of one sequence."""
        total = 0
        for layer in self.model.layers:
            if isinstance(state := layer.mixer, State):
                if state.heads % self.devices:
                    raise LedgerError(
                        f"{state.heads} heads of a state do not split over {self.devices} devices"
                    )
                whole = STATE_BYTES * state.values + CONV_BYTES * state.conv_values
                total += ceil_div(whole, self.devices)
        return total

    @property
    def constant_bytes(self) -> int:
        """Bytes that do not depend on the sequences: the scales of static formats."""
        return sum(
            kv_format.head_bytes * 2 * layer.mixer.kv_heads_of(self.devices)
            for layer, kv_format in zip(self.model.layers, self.formats, strict=True)
            if isinstance(layer.mixer, Heads)
        )

    def sequence_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of a sequence of `num_tokens` tokens, before its next token.

        Raises:
          LedgerError: the number of tokens is negative.
        """
        check_least(0, num_tokens=num_tokens)
        return self.state_bytes + sum(
            count * one.kept(num_tokens, self.page_size) * one.bytes_per_page
            for one, count in self._distinct
        )

    def most_bytes(self, num_tokens: int) -> int:
        """Returns the most bytes that a sequence holds while it grows to `num_tokens` tokens.

        The first page of a window is freed when the window has moved past all its tokens, so a
        longer sequence may hold one page less.

        Raises:
          LedgerError: there is no token.
        """
        check_least(1, num_tokens=num_tokens)
        lengths = range(max(1, num_tokens - self.page_size + 1), num_tokens + 1)
        slides = any(one.span.window is not None for one in self.pages)
        return max(map(self.sequence_bytes, lengths if slides else lengths[-1:]))

    def pool_bytes(self, num_pages: Sequence[int]) -> int:
        """Returns the bytes of the page arrays, null pages included.

        Args:
          num_pages: N of each layer group. A group is all layers that keep the same tokens; groups
            are in order of first appearance, and those of exact tokens come last.

        Raises:
          LedgerError: the cache has another number of groups.
        """
        groups: dict[tuple[Span, int, bool], int] = {}
        for one in self.pages:
            key = one.span, one.sink_pages, one.exact
            groups[key] = groups.get(key, 0) + one.bytes_per_page
        if len(num_pages) != len(groups):
            raise LedgerError(f"{len(num_pages)} numbers of pages: there are {len(groups)} groups")
        sizes = zip(num_pages, groups.values(), strict=True)
        return self.constant_bytes + sum(n * size for n, size in sizes)

    def largest_context(self, num_bytes: int, batch: int = 1) -> int | None:
        """Returns the most tokens per sequence with which `batch` equal sequences fit.

        It is 0 if not even one page per sequence fits. It is None if every length up to 2^40 tokens
        fits, which happens when all layers have windows.

        Raises:
          LedgerError: there is no sequence.
        """
        check_least(1, batch=batch)
        share = (num_bytes - self.constant_bytes) // batch
        found = bisect_right(range(1, MOST_TOKENS + 1), share, key=self.most_bytes)
        return None if found == MOST_TOKENS else found

    def largest_batch(self, num_bytes: int, num_tokens: int) -> int:
        """Returns how many sequences of `num_tokens` tokens fit.

        Raises:
          LedgerError: there is no token.
        """
        return max(0, num_bytes - self.constant_bytes) // max(1, self.most_bytes(num_tokens))

    def crossing_context(self, num_bytes: int, batch: int = 1) -> int | None:
        """Returns the first length at which `batch` sequences take at least `num_bytes` bytes, for
        example those of the weights; None if they take less at 2^40 tokens.

        Raises:
          LedgerError: there is no sequence.
        """
        check_least(1, batch=batch)
        lengths, grown = range(1, MOST_TOKENS + 1), num_bytes - self.constant_bytes
        found = bisect_left(lengths, grown, key=lambda n: batch * self.most_bytes(n))
        return None if found == len(lengths) else lengths[found]

    @cached_property
    def _distinct(self) -> tuple[tuple[Pages, int], ...]:
        """The different pages, and how many layers have each."""
        counts: dict[Pages, int] = {}
        for one in self.pages:
            counts[one] = counts.get(one, 0) + 1
        return tuple(counts.items())

    def _page_bytes(self, mixer: Heads | Latent, kv_format: FormatSpec) -> int:
        P = self.page_size
        if isinstance(mixer, Heads):
            per_head = kv_format.k_page_bytes(P, mixer.key_dim)
            per_head += kv_format.v_page_bytes(P, mixer.value_dim)
            return mixer.kv_heads_of(self.devices) * per_head
        if kv_format.kind in ("channel", "static"):
            raise LedgerError(
                f"{kv_format.name}: needs K and V by head, but {self.model.name} keeps latents"
            )
        return kv_format.k_page_bytes(P, mixer.rank + mixer.rope_dim)


def weight_bytes(model: Model, weights: str = "bf16", devices: int = 1) -> int:
    """Returns the bytes of a model's parameters on one device.

    Args:
      model: the model.
      weights: how they are stored: a name from `WEIGHT_BITS`.
      devices: number of devices of a tensor-parallel split; each holds an even share.

    Raises:
      LedgerError: there is no such way to store weights, or no device.
    """
    check_least(1, devices=devices)
    return _bytes_of(ceil_div(model.parameters, devices), weights)


def step_weight_bytes(model: Model, weights: str = "bf16", *, batch: int = 1) -> int:
    """Returns the bytes of the parameters that a decode step reads, without the embedding's rows.

    Routed experts count if at least one of the `batch` tokens chose them, at random and evenly: of
    n experts and k per token, n (1 - (1 - k / n)^batch) are expected.

    Raises:
      LedgerError: there is no such way to store weights, or no sequence.
    """
    check_least(1, batch=batch)
    read = float(model.head_weights + model.vectors)
    for one in model.layers:
        mlp = one.mlp
        read += one.mixer_weights + one.vectors + mlp.weights + mlp.vectors
        if mlp.experts:
            missed = (1 - mlp.experts_per_token / mlp.experts) ** batch
            read += mlp.experts * (1 - missed) * (mlp.expert_weights + mlp.expert_vectors)
    return _bytes_of(round(read), weights)


def step_seconds(
    ledger: CacheLedger, bandwidth: float, *, num_tokens: int, batch: int = 1, weights: str = "bf16"
) -> float:
    """Returns a lower bound of the time of a decode step, in seconds: the bytes that it reads,
    divided by the memory bandwidth.

    Args:
      ledger: the cache; its devices work at the same time.
      bandwidth: bandwidth of each device, in bytes per second.
      num_tokens: tokens of each sequence.
      batch: number of sequences.
      weights: how they are stored: a name from `WEIGHT_BITS`.

    Raises:
      LedgerError: a number is out of range.
    """
    if not bandwidth > 0:
        raise LedgerError(f"bandwidth = {bandwidth} must be above 0")
    read = step_weight_bytes(ledger.model, weights, batch=batch) / ledger.devices
    return (read + batch * ledger.sequence_bytes(num_tokens)) / bandwidth


def _bytes_of(parameters: int, weights: str) -> int:
    if weights not in WEIGHT_BITS:
        raise LedgerError(f"weights of {weights!r}: there are {', '.join(WEIGHT_BITS)}")
    return -int(-parameters * WEIGHT_BITS[weights] // 8)
