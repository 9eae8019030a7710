"""Which caches of a model fit into a memory: by heads, format, window and page size.

Fewer KV heads or a narrower window make another model of it, which has to be trained for it; what
that costs is not known here. What a format costs is, where it was measured (`quality`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.ledger.errors import LedgerError, check_least
from jaxkv.ledger.formats import choose_formats
from jaxkv.ledger.memory import CacheLedger, weight_bytes
from jaxkv.ledger.quality import Quality, measured
from jaxkv.ledger.shapes import Heads, Model

FORMATS = ("bf16", "int8", "fp8_e4m3", "int4", "kivi4", "kivi_k4v2", "kivi2", "kivi2_r32_s1")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A cache that fits, on each device.

    Attributes:
      kv_heads: K; None for the model's own.
      kv_format: how values are stored.
      window: on every layer that saw more; None for the model's own.
      page_size: P.
      kv_bytes: of all sequences.
      total_bytes: with the weights.
      largest_context: of so many sequences, in what the weights leave; None for no limit.
      largest_batch: of sequences of that context.
      quality: what the format costs; None where it was not measured.
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
        """Sorts options: fewest changes to the model, least loss of quality, fewest bytes."""
        changes = (self.kv_heads is not None) + (self.window is not None)
        loss = self.quality.perplexity_ratio if self.quality else float("inf")
        return changes, loss, self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits and what does not.

    Attributes:
      options: that fit, the best first.
      tried: combinations that were looked at.
      least_bytes: what the smallest of them takes, weights included.
      notes: which combinations the model does not have.
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
    formats: Sequence[str] = FORMATS,
    windows: Sequence[int] = (),
    page_sizes: Sequence[int] = (16, 32, 64),
    weights: str = "bf16",
    devices: int = 1,
) -> Plan:
    """Looks at every combination.

    Args:
      model: whose cache it is.
      memory: bytes of each device.
      context: tokens of each sequence.
      batch: sequences.
      kv_heads: numbers beside the model's own.
      formats: choices, as `CacheLedger.of` takes them.
      windows: beside the model's own.
      page_sizes: P.
      weights: how they are stored.
      devices: of a tensor-parallel split.

    Raises:
      LedgerError: a number or name is none, or no combination fits the model. Formats that there
        are, and that it cannot have, are notes.
    """
    check_least(1, context=context, batch=batch, devices=devices)
    for choice in formats:
        choose_formats(choice, [layer.slides for layer in model.layers])
    options, notes, tried, least = [], [], 0, None
    heads: list[int | None] = [None, *(K for K in kv_heads if K not in own_kv_heads(model))]
    for K, window in itertools.product(heads, [None, *windows]):
        variant = model if K is None else model.with_kv_heads(K)
        if window is not None:
            variant = variant.with_window(window)
            if variant.layers == model.layers:
                continue
        stored = weight_bytes(variant, weights, devices)
        for choice, page_size in itertools.product(formats, page_sizes):
            try:
                ledger = CacheLedger.of(variant, choice, page_size=page_size, devices=devices)
            except LedgerError as error:
                if str(error) not in notes:
                    notes.append(str(error))
                continue
            tried += 1
            kv_bytes = batch * ledger.most_bytes(context) + ledger.constant_bytes
            total = stored + kv_bytes
            least = total if least is None else min(least, total)
            if total <= memory:
                same = K is None and window is None
                options.append(
                    Option(
                        kv_heads=K,
                        kv_format=choice,
                        window=window,
                        page_size=page_size,
                        kv_bytes=kv_bytes,
                        total_bytes=total,
                        largest_context=ledger.largest_context(memory - stored, batch),
                        largest_batch=ledger.largest_batch(memory - stored, context),
                        quality=measured(model.name, choice, page_size) if same else None,
                    )
                )
    if least is None:
        raise LedgerError(notes[0] if notes else f"{model.name}: no combination to look at")
    options.sort(key=lambda one: one.order)
    return Plan(options=tuple(options), tried=tried, least_bytes=least, notes=tuple(notes))


def own_kv_heads(model: Model) -> set[int]:
    """K of a model's layers."""
    mixers = [one.mixer for one in model.layers]
    return {one.kv_heads for one in mixers if isinstance(one, Heads)}


def fewer_kv_heads(model: Model) -> list[int]:
    """What a model's KV heads can be reduced to: half of its own, a quarter, .., one.

    None where a layer has no heads of its own, or layers differ.
    """
    own = own_kv_heads(model)
    if len(own) != 1 or not all(isinstance(one.mixer, Heads) for one in model.layers):
        return []
    (K,) = own
    found = [K // n for n in (2, 4, 8, 16, 32, 64) if K % n == 0]
    return found if K == 1 or 1 in found else [*found, 1]
