"""Which pages of a sequence a sliding window still needs. Plain Python, for the cache, the host's
page tables and the ledger alike.

The next token of a sequence of n tokens has the position n. With a window of W keys, its own
included, it sees the positions from n - W + 1 on. Pages before the first of these can be freed,
except for some sink pages at the beginning of the sequence.
"""

from jaxkv.arith import ceil_div


def first_kept_page(num_tokens: int, window: int | None, page_size: int) -> int:
    """Returns the first logical page, sink pages aside, that a sequence still needs.

    Args:
      num_tokens: tokens of the sequence, before its next token.
      window: keys that a query sees, its own included; None for all.
      page_size: P.
    """
    return 0 if window is None else max(0, num_tokens - window + 1) // page_size


def num_kept_pages(num_tokens: int, window: int | None, sink_pages: int, page_size: int) -> int:
    """Returns the number of pages that a sequence holds before its next token.

    Args:
      num_tokens, window, page_size: see `first_kept_page`.
      sink_pages: first pages of the sequence that are always kept.
    """
    first = first_kept_page(num_tokens, window, page_size)
    return ceil_div(num_tokens, page_size) - first + min(first, sink_pages)
