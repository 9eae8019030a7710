"""What a model's cache and weights take, in bytes, exactly.

    cache of a sequence   whole pages of every layer, parameters of formats and bfloat16 pages of
                          exact tokens included, and the constant states; what lies behind a window
                          is gone, a chunk counts as a full one
    a token               what its K and V take in every layer, a page's parameters shared evenly
    a device's share      query heads are split evenly, KV heads where they divide, or else they
                          are repeated; a latent is on each

It equals the `nbytes` of the arrays that `jaxkv.cache` makes (`tests/ledger/test_memory.py`).
Not counted: page tables (4 bytes a page), activations, what a framework takes for itself.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from jaxkv.ledger.errors import LedgerError, check_least
from jaxkv.ledger.formats import BF16, Format, choose_formats, get_format, preferred_page_size
from jaxkv.ledger.shapes import Heads, Latent, Layer, Mlp, Model, Shared, Span, State
from jaxkv.ledger.units import MOST_TOKENS

PAGE_SIZES = range(1, 1025)
STATE_BYTES, CONV_BYTES = 4, 2  # of a number: states are float32, convolutions bfloat16

# Bits of a weight. The blocks of 32 of mxfp4 have a scale of 8 bits, those of nvfp4, 16, too.
WEIGHT_BITS = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "int8": 8, "mxfp4": 4.25, "int4": 4}


class SpecLayer(Protocol):
    """A layer of a `jaxkv.cache.CacheSpec`."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...


class NamedFormat(Protocol):
    """A format of one."""

    @property
    def name(self) -> str: ...


class Spec(Protocol):
    """A `jaxkv.cache.CacheSpec`, which the ledger does not import."""

    @property
    def layers(self) -> Sequence[SpecLayer]: ...
    @property
    def formats(self) -> Sequence[NamedFormat]: ...
    @property
    def page_size(self) -> int: ...


class Pages(NamedTuple):
    """Pages of one layer, or the bfloat16 ones beside its codes.

    Attributes:
      span: the tokens that are kept.
      sink_pages: pages at the beginning that are kept, too.
      exact: they are the ones beside codes.
      bytes_per_page: on one device.
    """

    span: Span
    sink_pages: int
    exact: bool
    bytes_per_page: int

    def kept(self, num_tokens: int, page_size: int) -> int:
        """Pages that a sequence holds when its next token is awaited; of a chunk, at most."""
        end = -(-num_tokens // page_size)
        if self.span.chunk is not None:
            return min(end, -(-self.span.chunk // page_size))
        if self.span.window is None:
            return end
        first = max(0, num_tokens - self.span.window + 1) // page_size
        return end - first + min(first, self.sink_pages)


@dataclass(frozen=True, kw_only=True)
class CacheLedger:
    """The cache of a model in some formats.

    Attributes:
      model: whose cache it is.
      formats: of each layer.
      page_size: P.
      devices: that each hold a share; figures are of one of them.
    """

    model: Model
    formats: tuple[Format, ...]
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
        """The ledger of a model.

        Args:
          model: whose cache it is.
          kv_format: a format, or a choice by layer (`formats.choose_formats`).
          page_size: P; None takes what suits the format.
          devices: of a tensor-parallel split.

        Raises:
          LedgerError: a format, page size or split that does not fit the model.
        """
        formats = choose_formats(kv_format, [layer.slides for layer in model.layers])
        size = preferred_page_size(formats) if page_size is None else page_size
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
        _ = ledger.pages, ledger.state_bytes  # what does not fit is refused here
        return ledger

    @classmethod
    def of_spec(cls, spec: Spec, name: str = "spec") -> "CacheLedger":
        """The ledger of a `jaxkv.cache.CacheSpec`, of which the layers' mixers alone are known."""
        layers = tuple(
            Layer(
                mixer=Heads(
                    query_heads=one.kv_heads,
                    kv_heads=one.kv_heads,
                    key_dim=one.head_dim,
                    value_dim=one.head_dim,
                    span=Span(window=one.window),
                ),
                mixer_weights=0,
                vectors=0,
                mlp=Mlp(weights=0),
            )
            for one in spec.layers
        )
        model = Model(
            name=name, width=0, layers=layers, embedding=0, head_weights=0, tied=True, vectors=0
        )
        formats = tuple(get_format(one.name) for one in spec.formats)
        return cls(model=model, formats=formats, page_size=spec.page_size)

    @cached_property
    def pages(self) -> tuple[Pages, ...]:
        """The pages of each layer that has some, and behind them the exact ones."""
        own, exact = [], []
        for layer, kv_format in zip(self.model.layers, self.formats, strict=True):
            if isinstance(layer.mixer, Shared | State):
                continue
            span = layer.mixer.span
            own.append(Pages(span, 0, False, self._page_bytes(layer.mixer, kv_format)))
            if (kept := kv_format.exact) is not None:
                size = self._page_bytes(layer.mixer, BF16)
                exact.append(Pages(Span(window=kept.recent + 1), kept.sink_pages, True, size))
        return (*own, *exact)

    @property
    def bytes_per_token(self) -> int | float:
        """Bytes that a token takes in all layers, a page's parameters shared evenly; without the
        exact pages, of which a sequence has a few, and states."""
        whole, rest = divmod(
            sum(one.bytes_per_page for one in self.pages if not one.exact), self.page_size
        )
        return whole + rest / self.page_size if rest else whole

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a sequence's constant states."""
        total = 0
        for layer in self.model.layers:
            if isinstance(state := layer.mixer, State):
                if state.heads % self.devices:
                    raise LedgerError(
                        f"{state.heads} heads of a state do not split over {self.devices} devices"
                    )
                whole = STATE_BYTES * state.values + CONV_BYTES * state.conv_values
                total += -(-whole // self.devices)
        return total

    @property
    def constant_bytes(self) -> int:
        """Bytes that there are once, whatever the sequences: static scales."""
        return sum(
            kv_format.head_bytes * 2 * layer.mixer.kv_heads_of(self.devices)
            for layer, kv_format in zip(self.model.layers, self.formats, strict=True)
            if isinstance(layer.mixer, Heads)
        )

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of a sequence of so many tokens, when its next token is awaited.

        Raises:
          LedgerError: they are less than none.
        """
        check_least(0, num_tokens=num_tokens)
        return self.state_bytes + sum(
            count * one.kept(num_tokens, self.page_size) * one.bytes_per_page
            for one, count in self._distinct
        )

    def most_bytes(self, num_tokens: int) -> int:
        """The most that a sequence holds while it grows to so many tokens: a window's first page
        goes when all its tokens are behind, so that a longer sequence may hold a page less.

        Raises:
          LedgerError: there is no token.
        """
        check_least(1, num_tokens=num_tokens)
        lengths = range(max(1, num_tokens - self.page_size + 1), num_tokens + 1)
        slides = any(one.span.window is not None for one in self.pages)
        return max(map(self.sequence_bytes, lengths if slides else lengths[-1:]))

    def pool_bytes(self, num_pages: Sequence[int]) -> int:
        """Bytes of the arrays of pools of so many pages, the null pages included.

        Args:
          num_pages: N of each layer group: layers that keep the same tokens, in order of first
            appearance, and the exact pages of those behind them.

        Raises:
          LedgerError: there are more groups, or fewer.
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
        """Tokens of the longest of `batch` equal sequences that fit: 0 where not even a page does,
        None where all do, up to 2^40 tokens, since what is kept stops growing.

        Raises:
          LedgerError: there is no sequence.
        """
        check_least(1, batch=batch)
        share = (num_bytes - self.constant_bytes) // batch
        found = bisect_right(range(1, MOST_TOKENS + 1), share, key=self.most_bytes)
        return None if found == MOST_TOKENS else found

    def largest_batch(self, num_bytes: int, num_tokens: int) -> int:
        """How many sequences of so many tokens fit.

        Raises:
          LedgerError: there is no token.
        """
        return max(0, num_bytes - self.constant_bytes) // max(1, self.most_bytes(num_tokens))

    def crossing_context(self, num_bytes: int, batch: int = 1) -> int | None:
        """The first length at which `batch` sequences take at least so many bytes, as the weights.

        None where they never do, which is at 2^40 tokens.

        Raises:
          LedgerError: there is no sequence.
        """
        check_least(1, batch=batch)
        lengths, grown = range(1, MOST_TOKENS + 1), num_bytes - self.constant_bytes
        found = bisect_left(lengths, grown, key=lambda n: batch * self.most_bytes(n))
        return None if found == len(lengths) else lengths[found]

    @cached_property
    def _distinct(self) -> tuple[tuple[Pages, int], ...]:
        """Pages that are alike, and how many layers have them."""
        counts: dict[Pages, int] = {}
        for one in self.pages:
            counts[one] = counts.get(one, 0) + 1
        return tuple(counts.items())

    def _page_bytes(self, mixer: Heads | Latent, kv_format: Format) -> int:
        P = self.page_size
        if isinstance(mixer, Heads):
            a_head = kv_format.k_page_bytes(P, mixer.key_dim)
            a_head += kv_format.v_page_bytes(P, mixer.value_dim)
            return mixer.kv_heads_of(self.devices) * a_head
        if kv_format.by_channel or kv_format.head_bytes:
            raise LedgerError(
                f"{kv_format.name}: is for K and V by head, and {self.model.name} keeps latents"
            )
        return kv_format.k_page_bytes(P, mixer.rank + mixer.rope_dim)


def weight_bytes(model: Model, weights: str = "bf16", devices: int = 1) -> int:
    """Bytes of the parameters, each device holding an even share.

    Args:
      model: whose they are.
      weights: how they are stored, of `WEIGHT_BITS`.
      devices: of a tensor-parallel split.

    Raises:
      LedgerError: they are not stored so, or there is no device.
    """
    check_least(1, devices=devices)
    return _bytes_of(-(-model.parameters // devices), weights)


def step_weight_bytes(model: Model, weights: str = "bf16", *, batch: int = 1) -> int:
    """Bytes of the parameters that a decode step reads, the embedding's rows left out.

    Of routed experts those that any of `batch` tokens chose, at random and evenly: of n experts and
    k a token, n (1 - (1 - k / n)^batch) are expected.

    Raises:
      LedgerError: they are not stored so, or there is no sequence.
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
    """Time that a decode step cannot be shorter than: its bytes over the memory's bandwidth.

    Args:
      ledger: of the cache; its devices work at once.
      bandwidth: of each device, bytes a second.
      num_tokens: of each sequence.
      batch: sequences.
      weights: how they are stored.

    Raises:
      LedgerError: a number is none.
    """
    if not bandwidth > 0:
        raise LedgerError(f"bandwidth = {bandwidth} must be above 0")
    read = step_weight_bytes(ledger.model, weights, batch=batch) / ledger.devices
    return (read + batch * ledger.sequence_bytes(num_tokens)) / bandwidth


def _bytes_of(parameters: int, weights: str) -> int:
    if weights not in WEIGHT_BITS:
        raise LedgerError(f"weights of {weights!r}: there are {', '.join(WEIGHT_BITS)}")
    return -int(-parameters * WEIGHT_BITS[weights] // 8)
