"""What formats cost in quality, where it was measured: `quality.json`, the tables of the docs.

Nothing is interpolated: a model, format and page size that nobody measured has no figure. Not here:
the measuring (`python scripts bench formats`).
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

STAND_IN = "smollm2-135m"  # for models that were not measured, and then named


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The distance of a format from the full cache on a text.

    Attributes:
      model: that was measured.
      date: of the measurement, ISO 8601.
      format, page_size: with which.
      perplexity_ratio: perplexity, in parts of the full cache's.
      kl_mean, kl_p99: KL(full || format) of next tokens, nats.
      top1: share of tokens whose likeliest next one is the same.
    """

    model: str
    date: str
    format: str
    page_size: int
    perplexity_ratio: float
    kl_mean: float
    kl_p99: float
    top1: float


def measured(model: str, kv_format: str, page_size: int) -> Quality | None:
    """What a format costs a model, or where that was not measured, the stand-in.

    Pages matter to kivi formats alone, whose groups they are.
    """
    models = {one.model for one in _measurements()}
    name = model if model in models else STAND_IN
    for one in _measurements():
        if (one.model, one.format) == (name, kv_format) and (
            "kivi" not in kv_format or one.page_size == page_size
        ):
            return one
    return None


@cache
def _measurements() -> tuple[Quality, ...]:
    text = (files("jaxkv.ledger") / "quality.json").read_text("utf-8")
    return tuple(
        Quality(model=study["model"], date=study["date"], **row)
        for study in json.loads(text)
        for row in study["rows"]
    )
