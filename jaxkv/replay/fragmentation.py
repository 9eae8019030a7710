"""What an allocator of KV slots wastes while a service runs.

Requests arrive, wait in order of arrival, are admitted when the allocator has room, grow by one
token per step and end. A slot has room for the K and V of one token. At any time it is one of

    used        it holds a token
    reserved    it will hold a token of the sequence that has it
    internal    the sequence that has it will never need it: the end of a page or of a longest run
    external    it is free, and all free slots would be enough for the waiting request if they were
                in one piece
    free        any other slot

All but used and free slots are waste (arXiv 2309.06180, figure 2). Paged allocation takes pages
from `jaxkv.prefix.PagePool`, as the engine does. If they run out, the sequence that was admitted
last waits again, and continues at its length when there is room.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxkv.replay.errors import NothingFits, ReplayError
from jaxkv.replay.stores import Slots, Store, make_store
from jaxkv.replay.traces import TraceRequest

_SAMPLES = 400  # at least; at most twice as many


class Sample(NamedTuple):
    """The slots at one time, and the numbers of running and waiting sequences."""

    seconds: float
    used: int
    reserved: int
    internal: int
    external: int
    running: int
    waiting: int


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """How an allocator served a series of requests. Slots are means over time.

    Attributes:
      allocator: a name from `stores.ALLOCATORS`.
      page_size: P; None if the allocator is not paged.
      capacity: number of slots.
      requests: number of requests.
      refused: number of requests that were too long to be served at all.
      admitted: number of requests that were running or done when the last one arrived.
      preemptions: how often a sequence had to wait again.
      used, reserved, internal, external: see the module.
      mean_running: mean number of running sequences.
      most_running: largest number of running sequences.
      mean_wait: mean time from arrival to admission, in seconds.
      seconds: time until the last request was served.
      samples: the slots over time.
    """

    allocator: str
    page_size: int | None
    capacity: int
    requests: int
    refused: int
    admitted: int
    preemptions: int
    used: float
    reserved: float
    internal: float
    external: float
    mean_running: float
    most_running: int
    mean_wait: float
    seconds: float
    samples: tuple[Sample, ...] = field(repr=False, compare=False)

    @property
    def waste(self) -> float:
        """Wasted slots, as a share of used and wasted slots."""
        lost = self.reserved + self.internal + self.external
        return lost / (self.used + lost) if self.used else 0.0


def measure_fragmentation(
    requests: Sequence[TraceRequest],
    allocator: str,
    *,
    capacity: int,
    page_size: int = 16,
    max_length: int | None = None,
    step_seconds: float = 0.03,
    on_request: Callable[[], object] = lambda: None,
) -> Fragmentation:
    """Replays requests over an allocator.

    Args:
      requests: requests in order of arrival.
      allocator: a name from `stores.ALLOCATORS`.
      capacity: number of slots.
      page_size: P of the allocator `paged`.
      max_length: slots that `max-length` reserves for each sequence; None for the power of two that
        holds every request.
      step_seconds: time of a step, in which each running sequence grows by one token.
      on_request: called when a request is served or refused.

    Raises:
      ReplayError: a number is out of range.
      NothingFits: no request can be served, or a page is larger than all slots.
    """
    longest = max((one.prompt + one.answer for one in requests), default=0)
    max_length = max_length or 1 << max(0, longest - 1).bit_length()
    store = make_store(allocator, capacity, page_size, max_length)
    if not 1e-6 <= step_seconds <= 1e6:
        raise ReplayError(f"{step_seconds} seconds per step: must be 1e-6 to 1e6")
    service = _Service(store, requests, step_seconds, on_request)
    service.run()
    if service.served == 0:
        room = f"{capacity} slots"
        if allocator == "max-length":
            room = f"the longest length, {max_length}, of {room}"
        raise NothingFits(f"{allocator}: none of {len(requests)} requests fits into {room}")
    steps = max(1, service.now - service.first)
    mean = {name: total / steps for name, total in service.totals.items()}
    return Fragmentation(
        allocator=allocator,
        page_size=page_size if allocator == "paged" else None,
        capacity=capacity,
        requests=len(requests),
        refused=len(requests) - service.served,
        admitted=service.admitted,
        preemptions=service.preemptions,
        used=mean["used"],
        reserved=mean["promised"] - mean["used"],
        internal=mean["given"] - mean["promised"],
        external=mean["external"],
        mean_running=mean["running"],
        most_running=service.most_running,
        mean_wait=service.waited * step_seconds / service.served,
        seconds=steps * step_seconds,
        samples=tuple(service.samples),
    )


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request that waits or runs.

    Attributes:
      arrived: step of its arrival.
      length: tokens at its last or next admission.
      final: tokens at its end.
      birth: step at which it would have had no token, so that its length is `now - birth`.
      slots: its slots.
      due: step at which it ends or its slots are full.
      admitted: whether it was admitted before.
    """

    arrived: int
    length: int
    final: int
    birth: int = 0
    slots: Slots = field(default_factory=lambda: Slots(0))
    due: int = -1
    admitted: bool = False


class _Service:
    """The simulation. It goes from event to event, since between events all sums have closed forms.

    Attributes:
      now: current step.
      first: step of the first arrival.
      served, admitted, preemptions, waited, most_running: see `Fragmentation`; waited is in steps.
      totals: sums over steps of slots and of running sequences.
      samples: see `Fragmentation`.
    """

    def __init__(
        self,
        store: Store,
        requests: Sequence[TraceRequest],
        step_seconds: float,
        on_request: Callable[[], object],
    ):
        self._store = store
        self._step_seconds = step_seconds
        self._on_request = on_request
        self._coming = deque(
            _Sequence(math.ceil(one.arrival / step_seconds), one.prompt, one.prompt + one.answer)
            for one in requests
        )
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[_Sequence, None] = {}  # in order of admission
        self._due: dict[int, list[_Sequence]] = {}
        self._steps: list[int] = []  # a heap of the keys of `_due`
        self.now = self.first = self._coming[0].arrived if self._coming else 0
        self.served = self.admitted = self.preemptions = self.waited = self.most_running = 0
        self._used = self._given = self._promised = self._external = 0
        names = ("used", "given", "promised", "external", "running")
        self.totals = dict.fromkeys(names, 0)
        self.samples: list[Sample] = []
        self._last_arrival = self._coming[-1].arrived if self._coming else 0
        self._every = max(1, (self._last_arrival - self.first) // _SAMPLES)
        self._next_sample = self.now

    def run(self) -> None:
        """Serves all requests."""
        while self._coming or self._steps:
            next_due = self._steps[0] if self._steps else math.inf
            arrival = self._coming[0].arrived if self._coming else math.inf
            self._advance(int(min(next_due, arrival)))
            if self.now == next_due:
                heapq.heappop(self._steps)
                self._happen(self._due.pop(self.now))
            while self._coming and self._coming[0].arrived == self.now:
                self._arrive(self._coming.popleft())
            if self._waiting or self._external:
                self._admit()

    def _advance(self, step: int) -> None:
        dt, n, totals = step - self.now, len(self._running), self.totals
        totals["used"] += self._used * dt + n * (dt * (dt - 1) // 2)
        totals["given"] += self._given * dt
        totals["promised"] += self._promised * dt
        totals["external"] += self._external * dt
        totals["running"] += n * dt
        self._used += n * dt
        self.now = step
        if step >= self._next_sample:
            self._sample()

    def _happen(self, due: list[_Sequence]) -> None:
        """Ends sequences, which frees slots, and then grows those whose slots are full."""
        growing = []
        for sequence in dict.fromkeys(due):  # a sequence that waited again may be in the list twice
            if sequence.due != self.now:
                continue
            if self.now - sequence.birth == sequence.final:
                self._leave(sequence)
                self.served += 1
                self._on_request()
            else:
                growing.append(sequence)
        if growing and not self._grow(growing):
            for sequence in growing:
                while sequence.due == self.now and not self._grow([sequence]):
                    self._preempt(next(reversed(self._running)))

    def _grow(self, growing: list[_Sequence]) -> bool:
        if not self._store.grow([sequence.slots for sequence in growing]):
            return False
        given = promised = 0
        for sequence in growing:
            length, count = self.now - sequence.birth, sequence.slots.count
            given += count - length
            promised += (count if count < sequence.final else sequence.final) - length
            self._schedule(sequence)
        self._given += given
        self._promised += promised
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self._leave(sequence)
        sequence.length = self.now - sequence.birth
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _arrive(self, sequence: _Sequence) -> None:
        if self._store.fits(sequence.final):
            self._waiting.append(sequence)
        else:
            self._on_request()

    def _admit(self) -> None:
        self._external = 0
        while self._waiting:
            head = self._waiting[0]
            slots = self._store.admit(head.length, head.final, len(self._running))
            if slots is None:
                self._external = self._store.external(head.length, head.final)
                break
            self._waiting.popleft()
            if not head.admitted:
                self.waited += self.now - head.arrived
                self.admitted += self.now <= self._last_arrival
            head.slots, head.birth, head.admitted = slots, self.now - head.length, True
            self._running[head] = None
            self._used += head.length
            self._given += slots.count
            self._promised += min(slots.count, head.final)
            self._schedule(head)
        self.most_running = max(self.most_running, len(self._running))

    def _leave(self, sequence: _Sequence) -> None:
        slots = sequence.slots
        self._used -= self.now - sequence.birth
        self._given -= slots.count
        self._promised -= min(slots.count, sequence.final)
        self._store.release(slots)
        del self._running[sequence]
        sequence.due = -1

    def _schedule(self, sequence: _Sequence) -> None:
        """Notes the step at which a sequence ends or its slots are full."""
        count, final = sequence.slots.count, sequence.final
        sequence.due = step = sequence.birth + (count if count < final else final)
        due = self._due.get(step)
        if due is None:
            self._due[step] = [sequence]
            heapq.heappush(self._steps, step)
        else:
            due.append(sequence)

    def _sample(self) -> None:
        self.samples.append(
            Sample(
                (self.now - self.first) * self._step_seconds,
                self._used,
                self._promised - self._used,
                self._given - self._promised,
                self._external,
                len(self._running),
                len(self._waiting),
            )
        )
        self._next_sample = self.now + self._every
        if len(self.samples) > 2 * _SAMPLES:
            del self.samples[1::2]
            self._every *= 2
