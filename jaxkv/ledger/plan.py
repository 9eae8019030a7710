"""Which caches of a model fit into a memory: by heads, format, window and page size.

A model with fewer KV heads or a narrower window is another model, which has to be trained; what
that costs in quality is not known here. What a format costs is listed if it was measured
(`quality`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxkv.errors import JaxkvError
from jaxkv.kv_format import formats_by_layer
from jaxkv.ledger.errors import LedgerError, check_least
from jaxkv.ledger.memory import CacheLedger, weight_bytes
from jaxkv.ledger.quality import Quality, measured
from jaxkv.ledger.shapes import Heads, Model

PLANNED = ("bf16", "int8", "fp8_e4m3", "int4", "kivi4", "kivi_k4v2", "kivi2", "kivi2_r32_s1")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A cache that fits. Bytes are per device.

    Attributes:
      kv_heads: K; None for the model's own.
      kv_format: how values are stored.
      window: the window of every layer that saw more; None for the model's own.
      page_size: P.
      kv_bytes: bytes of the cache of all sequences.
      total_bytes: the same with the weights.
      largest_context: most tokens per sequence, for as many sequences, in the memory that the
        weights leave; None if there is no limit.
      largest_batch: most sequences of the planned context in that memory.
      quality: what the format costs; None if it was not measured.
    """

    kv_heads: int | None
    kv_format: str
    window: int | None
    page_size: int
    kv_bytes: int
    total_bytes: int
    largest_context: int | None
    largest_batch: int
    quality: Quality | None

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts options: fewest changes to the model, then least loss of quality, then fewest
        bytes."""
        changes = (self.kv_heads is not None) + (self.window is not None)
        loss = self.quality.perplexity_ratio if self.quality else float("inf")
        return changes, loss, self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits and what does not.

    Attributes:
      options: the caches that fit, the best first.
      tried: number of combinations that the model can have.
      least_bytes: bytes of the smallest of them, weights included.
      notes: why the model cannot have the others.
    """

    options: tuple[Option, ...]
    tried: int
    least_bytes: int
    notes: tuple[str, ...]


def make_plan(
    model: Model,
    memory: int,
    *,
    context: int,
    batch: int = 1,
    kv_heads: Sequence[int] = (),
    formats: Sequence[str] = PLANNED,
    windows: Sequence[int] = (),
    page_sizes: Sequence[int] = (16, 32, 64),
    weights: str = "bf16",
    devices: int = 1,
) -> Plan:
    """Tries every combination of heads, window, format and page size.

    Args:
      model: the model.
      memory: bytes of each device.
      context: tokens of each sequence.
      batch: number of sequences.
      kv_heads: values of K to try, besides the model's own.
      formats: choices of formats to try, see `CacheLedger.of`.
      windows: windows to try, besides the model's own.
      page_sizes: values of P to try; those that the engine does not take become notes.
      weights: how weights are stored, see `weight_bytes`.
      devices: number of devices of a tensor-parallel split.

    Raises:
      LedgerError: a number is out of range, or the model can have none of the combinations. A
        format that the model cannot have becomes a note.
      UsageError: a format or a layer does not exist.
    """
    check_least(1, context=context, batch=batch, devices=devices)
    for choice in formats:
        formats_by_layer(choice, [layer.slides for layer in model.layers])
    options: list[Option] = []
    totals: list[int] = []
    notes: list[str] = []
    for K, window, variant in _variants(model, kv_heads, windows):
        stored = weight_bytes(variant, weights, devices)
        for choice, page_size in itertools.product(formats, page_sizes):
            try:
                ledger = CacheLedger.of(variant, choice, page_size=page_size, devices=devices)
            except JaxkvError as error:
                notes.append(str(error))
                continue
            kv_bytes = batch * ledger.most_bytes(context) + ledger.constant_bytes
            totals.append(stored + kv_bytes)
            if stored + kv_bytes > memory:
                continue
            options.append(
                Option(
                    kv_heads=K,
                    kv_format=choice,
                    window=window,
                    page_size=page_size,
                    kv_bytes=kv_bytes,
                    total_bytes=stored + kv_bytes,
                    largest_context=ledger.largest_context(memory - stored, batch),
                    largest_batch=ledger.largest_batch(memory - stored, context),
                    quality=measured(model.name, choice, page_size) if variant is model else None,
                )
            )
    if not totals:
        raise LedgerError(notes[0] if notes else f"{model.name}: no combination to try")
    return Plan(
        options=tuple(sorted(options, key=lambda one: one.order)),
        tried=len(totals),
        least_bytes=min(totals),
        notes=tuple(dict.fromkeys(notes)),
    )


def own_kv_heads(model: Model) -> set[int]:
    """Returns the values of K of a model's layers."""
    mixers = [one.mixer for one in model.layers]
    return {one.kv_heads for one in mixers if isinstance(one, Heads)}


def fewer_kv_heads(model: Model) -> list[int]:
    """Returns the numbers of KV heads that a model's own can be reduced to: half, a quarter, down
    to one.

    The list is empty if layers differ, or one has no KV heads of its own.
    """
    own = own_kv_heads(model)
    if len(own) != 1 or not all(isinstance(one.mixer, Heads) for one in model.layers):
        return []
    (K,) = own
    found = [K // n for n in (2, 4, 8, 16, 32, 64) if K % n == 0]
    return found if K == 1 or 1 in found else [*found, 1]


def _variants(
    model: Model, kv_heads: Sequence[int], windows: Sequence[int]
) -> Iterator[tuple[int | None, int | None, Model]]:
    """Yields K and window, None for the model's own, and the model with both; the model itself is
    the first one. A window that changes nothing is left out."""
    own = own_kv_heads(model)
    for K in (None, *(K for K in kv_heads if K not in own)):
        with_heads = model if K is None else model.with_kv_heads(K)
        yield K, None, with_heads
        for window in windows:
            narrowed = with_heads.with_window(window)
            if narrowed.layers != model.layers:
                yield K, window, narrowed
