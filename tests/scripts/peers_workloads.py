"""The requests that other systems were given when their rows of the benchmarks were made.

Written apart from `jaxkv.replay.workloads`, a token at a time, so that a change there is noticed.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

VOCAB = 128_000
CAPACITIES = dict(W1=200_000, W1g=200_000, W2=200_000, W2f=600_000, W3=200_000, W4=200_000)

Requests = Iterator[tuple[list[int], list[int]]]


def requests(name: str, trace: Path) -> Requests:
    """Prompt and answer of each request of a workload."""
    if name in ("W1", "W1g"):
        return chat(2_000 if name == "W1" else 100)
    return {"W2": questions, "W2f": questions, "W3": unique, "W4": lambda: hashed(trace)}[name]()


def draw(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(n)]


def chat(group: int) -> Requests:
    """Yields all turns of the conversations of a group, then those of the next group."""
    rng = random.Random(1)
    systems = [draw(rng, 512) for _ in range(8)]
    for base in range(0, 2_000, group):
        history: dict[int, list[int]] = {}
        for _ in range(5):
            for c in range(base, min(base + group, 2_000)):
                said = history.setdefault(c, list(systems[c % 8]))
                said.extend(draw(rng, 64))
                answer = draw(rng, 128)
                yield list(said), answer
                said.extend(answer)


def questions() -> Requests:
    rng = random.Random(2)
    documents = [draw(rng, 8_000) for _ in range(50)]
    order = [(d, q) for d in range(50) for q in range(40)]
    rng.shuffle(order)
    for d, _ in order:
        yield documents[d] + draw(rng, 32), draw(rng, 1)


def unique() -> Requests:
    rng = random.Random(3)
    for _ in range(5_000):
        yield draw(rng, 1_024), draw(rng, 1)


def hashed(trace: Path) -> Requests:
    """A block of 512 tokens becomes 64."""
    with trace.open() as lines:
        for line in lines:
            record = json.loads(line)
            prompt = []
            for block in record["hash_ids"]:
                base = (block * 2654435761) % 1_000_003
                prompt.extend((base + i * 7919 + block) % VOCAB for i in range(64))
            if 2 <= len(prompt) <= 16_384:
                length = max(1, min(64, record["output_length"] // 8))
                yield prompt, [(record["timestamp"] + i) % VOCAB for i in range(length)]
