"""The static choices of one attention call, checked once and handed to the backend whole."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a call computes and how, apart from its arrays; see `api.ragged_paged_attention`.

    Attributes:
      scale: factor on q.k.
      window: keys a query sees, itself included; None sees all.
      soft_cap: bound on the logits; None leaves them.
      query_tile: rows that the `xla` backend works on together; None picks by T and B.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    query_tile: int | None = None
