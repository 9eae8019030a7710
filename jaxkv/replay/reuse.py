"""What a prefix cache saves: requests are replayed over it, one after the other.

The saved multiply-adds are those of a whole prefill minus those of a prefill of the tokens after
the hit, attention to the hit included. `caches` and `optimum` have the caches, and `jaxkv.ledger`
counts multiply-adds.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from jaxkv.arith import round_up
from jaxkv.ledger import Model, prefill_macs
from jaxkv.ledger.compute import generation_macs
from jaxkv.ledger.shapes import State
from jaxkv.prefix.node import TOKEN, pack
from jaxkv.replay.caches import CACHES, PrefixCache, check_pages, make_cache
from jaxkv.replay.errors import ReplayError
from jaxkv.replay.optimum import Optimum

OPTIMUM = "optimum"
Packed = Collection[tuple[bytes, bytes]]  # prompts and answers


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one request took from the cache and left in it.

    Attributes:
      number: number of the request, from 1.
      prompt: tokens of the prompt.
      answer: tokens of the answer.
      matched: prompt tokens that were found.
      recomputed: prompt tokens that were not found.
      inserted: tokens that were computed and are cached from now on.
      evicted: slots that were evicted for it.
      held: slots of cached tokens after it.
      refused: whether it did not fit.
    """

    number: int
    prompt: int
    answer: int
    matched: int
    recomputed: int
    inserted: int
    evicted: int
    held: int
    refused: bool


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What a cache saved of a workload.

    Attributes:
      cache: name of the cache.
      eviction: name of the order of eviction.
      page_size: P.
      capacity: tokens that the cache holds.
      requests: number of requests.
      refused: number of requests that were longer than the cache.
      prompt_tokens: tokens of all prompts.
      hit_tokens: prompt tokens that were found.
      evicted_tokens: slots that were evicted.
      most_held: largest number of slots of cached tokens after a request.
      mean_held: mean number of slots of cached tokens after a request.
      prefill_flops: operations of all prefills without a prefix cache; 0 without a model.
      saved_flops: operations that hits saved; 0 without a model.
    """

    cache: str
    eviction: str
    page_size: int
    capacity: int
    requests: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    evicted_tokens: int
    most_held: int
    mean_held: float
    prefill_flops: int
    saved_flops: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def check_reusable(model: Model) -> None:
    """Raises ReplayError if a prefix of a model cannot be found by its pages.

    A constant state belongs to one position. A hit at an earlier position would need a copy of the
    state from there, which no cache of this package keeps or counts.
    """
    count = sum(isinstance(one.mixer, State) for one in model.layers)
    if count:
        raise ReplayError(
            f"{model.name}: {count} of {len(model.layers)} layers have a constant state, and "
            "prefix caches of pages keep no copies of it: its reuse is not counted"
        )


def pack_requests(
    requests: Iterable[tuple[list[int], list[int]]],
) -> Iterator[tuple[bytes, bytes]]:
    """Returns prompts and answers as packed tokens, as the prefix index takes them."""
    return ((pack(prompt), pack(answer)) for prompt, answer in requests)


def turns(
    requests: Packed, cache: str, *, capacity: int, page_size: int = 16, eviction: str = "lru"
) -> Iterator[Turn]:
    """Replays requests over a cache, and yields one turn per request.

    Args:
      requests: packed prompts and answers, none of them empty.
      cache: a name from `CACHES`.
      capacity: tokens that the cache holds.
      page_size: P, tokens per page.
      eviction: a name from `EVICTIONS`, or `optimum` for the upper limit of what the cache can
        find. It counts whole pages, or single tokens for the cache `token`.

    Raises:
      ReplayError: there is no such cache or eviction, or a number is out of range.
    """
    if eviction == OPTIMUM:
        if cache not in CACHES[2:]:
            raise ReplayError(f"{OPTIMUM}: needs a cache that keeps pages, not {cache!r}")
        check_pages(capacity, page_size)
        slots = round_up(capacity, page_size)
        made: PrefixCache = Optimum(requests, slots, 1 if cache == "token" else page_size)
    else:
        made = make_cache(cache, capacity, page_size, eviction)
    for number, (prompt, answer) in enumerate(requests, start=1):
        one = made.serve(prompt, answer)
        n, m = len(prompt) // TOKEN, len(answer) // TOKEN
        yield Turn(
            number=number,
            prompt=n,
            answer=m,
            matched=one.matched,
            recomputed=n - one.matched,
            inserted=0 if one.refused or cache in CACHES[:2] else n - one.matched + m - 1,
            evicted=one.evicted,
            held=one.held,
            refused=one.refused,
        )


def measure_reuse(
    requests: Packed,
    cache: str,
    *,
    capacity: int,
    page_size: int = 16,
    eviction: str = "lru",
    model: Model | None = None,
    on_request: Callable[[], object] = lambda: None,
) -> Reuse:
    """Replays requests and adds up their turns.

    Args:
      requests: what is asked, see `turns`.
      cache: name of the cache, see `turns`.
      capacity: tokens that the cache holds.
      page_size: P.
      eviction: name of the eviction policy.
      model: the model whose multiply-adds are counted, if any.
      on_request: called after each request.

    Raises:
      ReplayError: see `turns` and `check_reusable`.
    """
    if model is not None:
        check_reusable(model)
    count = refused = prompt = hit = evicted = most = held = total = saved = 0
    for turn in turns(requests, cache, capacity=capacity, page_size=page_size, eviction=eviction):
        count += 1
        refused += turn.refused
        prompt += turn.prompt
        hit += turn.matched
        evicted += turn.evicted
        most = max(most, turn.held)
        held += turn.held
        if model is not None:
            whole = prefill_macs(model, turn.prompt).total
            if cache == "none":
                whole = generation_macs(model, turn.prompt, turn.answer, cache=False).total
            total += 2 * whole
            if turn.matched:
                saved += 2 * (whole - prefill_macs(model, turn.prompt, turn.matched).total)
        on_request()
    return Reuse(
        cache=cache,
        eviction=eviction if cache in CACHES[2:] else "-",
        page_size=page_size,
        capacity=capacity,
        requests=count,
        refused=refused,
        prompt_tokens=prompt,
        hit_tokens=hit,
        evicted_tokens=evicted,
        most_held=most,
        mean_held=held / count if count else 0.0,
        prefill_flops=total,
        saved_flops=saved,
    )
