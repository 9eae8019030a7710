"""A host side and what a device would have in its pages: tests move it, and `check` looks at all.

The device is a list of slots a page; the K and V of a token are a number that depends on the
namespace and on every token up to it, as real ones do. Each token that a sequence would read must
be the one that it should see, however its page came to it.
"""

import numpy as np

from jaxkv.prefix import (
    Event,
    Namespace,
    OutOfPages,
    PageTables,
    Pin,
    Pins,
    check_integrity,
    make_index,
    make_pool,
    pack,
)

PUBLIC, SECRET = Namespace(), Namespace(salt="secret")


def kv(namespace: Namespace, tokens: list[int] | tuple[int, ...]) -> list[int]:
    """For each token what a device would compute."""
    values, value = [], hash(namespace)
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


class Row:
    """A sequence: tokens, and how many of them are computed."""

    def __init__(self, row: int, namespace: Namespace, tokens: list[int], num_computed: int):
        self.row = row
        self.namespace = namespace
        self.tokens = tokens
        self.num_computed = num_computed


class World:
    """Pools of `capacity` pages a group, an index, tables of `max_sequences` rows, and pins."""

    def __init__(
        self,
        P: int = 4,
        windows: tuple[int | None, ...] = (None,),
        policy: str = "lru",
        capacity: int = 30,
        max_sequences: int = 5,
        sink_pages: tuple[int, ...] | None = None,
    ):
        self.P, self.windows, self.now = P, windows, 0.0
        self.sink_pages = sink_pages or (0,) * len(windows)
        self.events: list[Event] = []
        self.pools = [make_pool(capacity + 1, window) for window in windows]
        self.index = make_index(
            self.pools,
            P,
            windows,
            sink_pages,
            eviction=policy,
            events=self.events.append,
            clock=self.tick,
        )
        self.policy = self.index.order.policy
        self.pins = Pins(self.index)
        self.tables = PageTables(
            self.pools,
            P,
            max_sequences=max_sequences,
            max_pages=capacity,
            windows=windows,
            sink_pages=sink_pages,
            index=self.index,
            pins=self.pins,
        )
        self.device = [[[0] * P for _ in range(capacity + 1)] for _ in windows]
        self.rows: list[Row] = []
        self.pinned: list[tuple[Pin, Namespace, list[int]]] = []

    def tick(self) -> float:
        """Returns the time; no two readings are equal."""
        self.now += 2**-10
        return self.now

    def start(self, tokens: list[int], namespace: Namespace = PUBLIC) -> Row:
        """Starts a sequence from its cached tokens."""
        sequence = self.try_start(tokens, namespace)
        assert sequence is not None
        return sequence

    def try_start(self, tokens: list[int], namespace: Namespace) -> Row | None:
        """Starts a sequence; returns None if its next token gets no page."""
        packed = pack(tokens[:-1])
        probed = self.index.probe(packed, namespace)
        row = self.tables.open()
        found, sources = self.tables.match(row, packed, namespace)
        assert found == probed
        return self._settle(Row(row, namespace, list(tokens), found), sources)

    def fork(self, parent: Row) -> Row | None:
        """Starts a sequence that continues from all computed tokens of another one."""
        n = parent.num_computed
        if not self.tables.can_fork(parent.row, n):
            return None
        row, sources = self.tables.fork(parent.row, n)
        return self._settle(Row(row, parent.namespace, [*parent.tokens[:n], 0], n), sources)

    def _settle(self, sequence: Row, sources: tuple[int, ...]) -> Row | None:
        """Takes a page for the next token and does the copies."""
        try:
            self.tables.grow(sequence.row, sequence.num_computed + 1)
        except (OutOfPages, ValueError):
            self.tables.close(sequence.row)
            return None
        place = sequence.num_computed // self.P
        for g, source in enumerate(sources):
            if source:
                target = self.tables.pages[g][sequence.row, place]
                self.device[g][target] = list(self.device[g][source])
        self.rows.append(sequence)
        return sequence

    def compute(self, sequence: Row, num_tokens: int, *, trim: bool = True) -> bool:
        """Writes K and V of the next tokens; without pages ends the sequence and returns False."""
        first = sequence.num_computed
        end = min(len(sequence.tokens), first + num_tokens)
        try:
            self.tables.grow(sequence.row, end)
        except (OutOfPages, ValueError):
            self.abort(sequence)
            return False
        self.check_reads(sequence)
        values = kv(sequence.namespace, sequence.tokens)
        for i in range(first, end):
            for g, table in enumerate(self.tables.pages):
                page = int(table[sequence.row, i // self.P])
                assert (table == page).sum() == 1, "a page that others read is written"
                self.device[g][page][i % self.P] = values[i]
        sequence.num_computed = end
        if trim:
            self.tables.trim(np.array([sequence.row]), np.array([end]))
        return True

    def publish(self, sequence: Row, *, whole: bool) -> None:
        """Publishes the computed tokens; with `whole`, only whole pages."""
        n = sequence.num_computed - (sequence.num_computed % self.P if whole else 0)
        self.tables.publish(sequence.row, pack(sequence.tokens[:n]), sequence.namespace)

    def finish(self, sequence: Row) -> None:
        """Publishes all computed tokens and ends the sequence."""
        self.publish(sequence, whole=False)
        self.abort(sequence)

    def abort(self, sequence: Row) -> None:
        """Ends the sequence."""
        self.tables.close(sequence.row)
        self.rows.remove(sequence)

    def run(self, tokens: list[int], namespace: Namespace = PUBLIC) -> int:
        """Runs a sequence from start to finish; returns how many of its tokens were cached."""
        sequence = self.start(tokens, namespace)
        found = sequence.num_computed
        assert self.compute(sequence, len(tokens), trim=False)  # once it is known, as engines do
        self.finish(sequence)
        self.check()
        return found

    def pin(self, tokens: list[int], namespace: Namespace, ttl_seconds: float) -> None:
        """Pins a prefix if the limit allows it."""
        try:
            pin = self.pins.pin(pack(tokens), namespace, ttl_seconds=ttl_seconds)
        except ValueError:
            return
        self.pinned.append((pin, namespace, tokens[: pin.num_tokens]))

    def end(self) -> None:
        """Ends everything, and checks that no page is held."""
        for sequence in list(self.rows):
            self.abort(sequence)
        for pin, _, _ in self.pinned:
            self.pins.unpin(pin)
        self.check()
        self.index.reset()
        self.check()
        assert not self.index.roots
        assert all(pool.num_free == pool.capacity for pool in self.pools)
        books = [*getattr(self.index, "_passed", {}).values()]
        books += [getattr(self.policy, name, {}) for name in ("_order", "_last", "_count")]
        assert not any(books), "a node that is gone is remembered"

    def check(self) -> None:
        """Checks that the accounts agree, and that each page has what its readers expect."""
        check_integrity(self.index, self.tables, self.pins.holdings())
        for namespace, tokens, ids in self.index.stored():
            first = (len(tokens) - 1) // self.P * self.P
            values = kv(namespace, tokens)[first:]
            for g, page in enumerate(ids):
                assert not page or self.device[g][page][: len(values)] == values
        for sequence in self.rows:
            self.check_reads(sequence)

    def check_reads(self, sequence: Row) -> None:
        """Checks that everything a sequence's next token sees is present and correct."""
        n = sequence.num_computed
        values = kv(sequence.namespace, sequence.tokens[:n])
        for g, window in enumerate(self.windows):
            first = 0 if window is None else max(0, n - window + 1)
            for i in (*range(min(self.sink_pages[g] * self.P, first)), *range(first, n)):
                page = self.tables.pages[g][sequence.row, i // self.P]
                assert page, f"group {g} lacks token {i} of {n}"
                assert self.device[g][page][i % self.P] == values[i]

    def longest_stored(self, tokens: list[int], namespace: Namespace) -> int:
        """Returns the longest prefix with stored pages, by a search of all pages."""
        best = 0
        for other, stored, _ in self.index.stored():
            if other == namespace:
                pairs = enumerate(zip(stored, tokens, strict=False))
                common = next((i for i, (a, b) in pairs if a != b), min(len(stored), len(tokens)))
                best = max(best, common)
        return best
