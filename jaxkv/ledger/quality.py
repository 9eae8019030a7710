"""What formats cost in quality: `quality.json`, which holds the tables of docs/kv_formats.md.

They were measured with `python scripts bench formats`. Nothing is interpolated: a model, format and
page size that was not measured has no figure.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

STAND_IN = "smollm2-135m"  # shown by name for models that were not measured


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How far the results with a format are from those of the full cache on a text.

    Attributes:
      model: the model that was measured.
      date: date of the measurement, ISO 8601.
      format: the KV format.
      page_size: P.
      perplexity_ratio: perplexity divided by that of the full cache.
      kl_mean: mean KL(full || format) of next-token distributions, in nats.
      kl_p99: 99th percentile of the same.
      top1: share of tokens whose most likely next token is the same.
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
    """Returns what a format costs a model, or the stand-in if the model was not measured; None if
    the format was not measured either.

    The page size matters only for kivi formats, which quantise page by page.
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
