"""The multiply-adds of a model: in a prefill, in decoding with a cache, and without a cache.

A *multiply-add* (MAC) is two floating-point operations. Matrix products count: projections and MLPs
(`linear`), scores and sums of values (`attention`), logits (`head`). Norms, softmax and RoPE do not
count. A prefill computes logits only for its last token.

    seen(p)       tokens that the token at position p sees: p + 1, or those of its window or chunk
    one token     linear + sum over layers of seen(p) * (H D + H D')
    with cache    each step computes one token
    without       each step computes all tokens again: step j of n computes j tokens

So attention takes n^2 / 2 pairs with a cache and n^3 / 6 without, and the cost of one step grows
with n instead of n^2. `simulate` counts the same by running the loops.
"""

from dataclasses import dataclass
from math import comb

from jaxkv.ledger.errors import check_least
from jaxkv.ledger.memory import CacheLedger, step_weight_bytes
from jaxkv.ledger.shapes import Model, Span, State


@dataclass(frozen=True, kw_only=True)
class Macs:
    """Multiply-adds by their purpose; see the module."""

    linear: int = 0
    attention: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.linear + self.attention + self.head

    @property
    def attention_share(self) -> float:
        """The share of attention, 0 to 1."""
        return self.attention / self.total if self.total else 0.0

    def __add__(self, other: "Macs") -> "Macs":
        return Macs(
            linear=self.linear + other.linear,
            attention=self.attention + other.attention,
            head=self.head + other.head,
        )


def prefill_macs(model: Model, num_tokens: int, cached: int = 0) -> Macs:
    """Returns the multiply-adds of a prompt's tokens after the first `cached` ones, and of the
    logits of its last token.

    Raises:
      LedgerError: a number is negative.
    """
    check_least(0, num_tokens=num_tokens, cached=cached)
    if num_tokens <= cached:
        return Macs()
    n = num_tokens - cached
    return Macs(
        linear=n * model.token_macs,
        attention=sum(
            pair * (_pairs(span, num_tokens) - _pairs(span, cached))
            for span, pair, _ in model.attentions
        ),
        head=model.head_weights,
    )


def decode_macs(model: Model, num_tokens: int) -> Macs:
    """Returns the multiply-adds of a step that computes one token after `num_tokens` cached ones.

    Raises:
      LedgerError: the number is negative.
    """
    check_least(0, num_tokens=num_tokens)
    return Macs(
        linear=model.token_macs,
        attention=sum(pair * span.seen(num_tokens) for span, _, pair in model.attentions),
        head=model.head_weights,
    )


def generation_macs(model: Model, prompt: int, new: int, *, cache: bool) -> Macs:
    """Returns the multiply-adds of drawing `new` tokens after a prompt, in closed form.

    The prefill of the prompt gives the first token. With a cache, each further token takes a step
    that computes one token; without a cache, a prefill of all tokens before it.

    Args:
      model: the model.
      prompt: tokens of the prompt, at least 1.
      new: tokens to draw, at least 1.
      cache: whether there is a cache.

    Raises:
      LedgerError: there is no token.
    """
    check_least(1, prompt=prompt, new=new)
    per_token = model.token_macs
    end = prompt + new  # the steps have prompt to end - 1 tokens
    if cache:
        decoding = Macs(
            linear=(new - 1) * per_token,
            attention=sum(
                pair * (_pairs(span, end - 1) - _pairs(span, prompt))
                for span, _, pair in model.attentions
            ),
            head=(new - 1) * model.head_weights,
        )
        return prefill_macs(model, prompt) + decoding
    return Macs(
        linear=per_token * (comb(end, 2) - comb(prompt, 2)),
        attention=sum(
            pair * (_summed_pairs(span, end) - _summed_pairs(span, prompt))
            for span, pair, _ in model.attentions
        ),
        head=new * model.head_weights,
    )


def simulate(model: Model, prompt: int, new: int, *, cache: bool) -> Macs:
    """Returns the same as `generation_macs`, by running the loops over steps, tokens and layers.

    Raises:
      LedgerError: there is no token.
    """
    check_least(1, prompt=prompt, new=new)
    linear = attention = head = 0
    cached = 0
    layers = [(one.token_macs, one.mixer) for one in model.layers]
    for step in range(new):
        length = prompt + step
        decodes = cache and step > 0
        for position in range(cached, length):
            for token_macs, mixer in layers:
                linear += token_macs
                if isinstance(mixer, State):
                    continue
                pair = mixer.decode_pair_macs if decodes else mixer.pair_macs
                attention += pair * len(_seen(mixer.span, position))
        head += model.head_weights
        cached = length if cache else 0
    return Macs(linear=linear, attention=attention, head=head)


def arithmetic_intensity(
    ledger: CacheLedger, *, num_tokens: int, batch: int = 1, weights: str = "bf16"
) -> float:
    """Returns the floating-point operations of a decode step per byte that it reads.

    Raises:
      LedgerError: a number is out of range.
    """
    check_least(1, batch=batch)
    flops = 2 * batch * decode_macs(ledger.model, num_tokens).total
    read = step_weight_bytes(ledger.model, weights, batch=batch)
    return flops / (read + batch * ledger.sequence_bytes(num_tokens) * ledger.devices)


def _seen(span: Span, position: int) -> range:
    """Returns the positions that the token at a position sees."""
    first = 0
    if span.window is not None:
        first = max(0, position - span.window + 1)
    elif span.chunk is not None:
        first = position // span.chunk * span.chunk
    return range(first, position + 1)


def _pairs(span: Span, n: int) -> int:
    """Returns the sum of `seen(p)` for p < n: pairs of a token and one that it sees."""
    if span.window is not None:
        inside = min(n, span.window)
        return comb(inside + 1, 2) + (n - inside) * span.window
    if span.chunk is not None:
        chunks, rest = divmod(n, span.chunk)
        return chunks * comb(span.chunk + 1, 2) + comb(rest + 1, 2)
    return comb(n + 1, 2)


def _summed_pairs(span: Span, n: int) -> int:
    """Returns the sum of `_pairs(t)` for t < n."""
    if span.window is not None:
        W = span.window
        inside = min(n, W + 1)
        beyond = comb(n, 2) - comb(inside, 2)  # the sum of t for inside <= t < n
        return comb(inside + 1, 3) + W * beyond - (n - inside) * comb(W, 2)
    if span.chunk is not None:
        C = span.chunk
        chunks, rest = divmod(n, C)
        whole = C * comb(C + 1, 2) * comb(chunks, 2) + chunks * comb(C + 1, 3)
        return whole + rest * chunks * comb(C + 1, 2) + comb(rest + 1, 3)
    return comb(n + 1, 3)
