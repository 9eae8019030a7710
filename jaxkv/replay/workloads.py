"""Workloads as token ids: prompts and answers, one request after the other.

    W1      2,000 conversations of 5 turns that take turns, with 8 system prompts
    W1g     the same, but 100 conversations at a time
    W2      2,000 questions about 50 documents of 8,000 tokens; W2f is the same for a larger cache
    W3      5,000 prompts that share nothing
    W4      the first 2,000 requests of a trace that fit, at an eighth of their size

The same seeds give the same tokens on every machine. `lengths` draws lengths without tokens, and
`traces` reads traces at their full size.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

VOCAB = 128_000
LONGEST = 16_384  # tokens per prompt
WORKLOADS = ("W1", "W1g", "W2", "W2f", "W3", "W4")

Requests = Iterator[tuple[list[int], list[int]]]  # prompt, answer


def stream(name: str, trace: Path | None = None) -> tuple[Requests, int]:
    """Returns the requests of a workload, and the capacity of its cache in tokens. W4 needs a
    trace."""
    if name == "W4":
        assert trace is not None
        requests = hashed_blocks(trace)
    elif name == "W3":
        requests = unique_prompts()
    elif name in ("W2", "W2f"):
        requests = questions()
    else:
        requests = conversations(at_a_time=100 if name == "W1g" else 2_000)
    return requests, 600_000 if name == "W2f" else 200_000


def conversations(
    num_talks: int = 2_000,
    turns: int = 5,
    *,
    at_a_time: int = 2_000,
    systems: int = 8,
    system_tokens: int = 512,
    asked: int = 64,
    answered: int = 128,
) -> Requests:
    """Yields the turns of conversations. `at_a_time` conversations take turns, and each begins with
    one of the system prompts."""
    rng = random.Random(1)
    prompts = [random_tokens(rng, system_tokens) for _ in range(systems)]
    for first in range(0, num_talks, at_a_time):
        numbers = range(first, min(first + at_a_time, num_talks))
        talks = [list(prompts[i % systems]) for i in numbers]
        for _ in range(turns):
            for talk in talks:
                talk += random_tokens(rng, asked)
                answer = random_tokens(rng, answered)
                yield list(talk), answer
                talk += answer


def questions() -> Requests:
    """Yields 40 questions of 32 tokens about each of 50 documents, shuffled."""
    rng = random.Random(2)
    documents = [random_tokens(rng, 8_000) for _ in range(50)]
    order = [document for document in documents for _ in range(40)]
    rng.shuffle(order)
    for document in order:
        yield document + random_tokens(rng, 32), random_tokens(rng, 1)


def unique_prompts() -> Requests:
    """Yields 5,000 prompts of 1,024 tokens."""
    rng = random.Random(3)
    for _ in range(5_000):
        yield random_tokens(rng, 1_024), random_tokens(rng, 1)


def hashed_blocks(path: Path) -> Requests:
    """Yields the first 2,000 requests of a trace that fit, with 64 made-up tokens per block.

    The file is a trace as in `traces`, already checked by `traces.read_trace`. Requests without
    blocks are skipped.
    """
    num_requests = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            prompt = [
                (number * 2_654_435_761 % 1_000_003 + i * 7_919 + number) % VOCAB
                for number in record.get("hash_ids", ())
                for i in range(64)
            ]
            if 2 <= len(prompt) <= LONGEST:
                length = max(1, min(64, record["output_length"] // 8))
                first = int(record.get("timestamp", 0))
                yield prompt, [(first + i) % VOCAB for i in range(length)]
                num_requests += 1
                if num_requests == 2_000:
                    return


def random_tokens(rng: random.Random, n: int) -> list[int]:
    """Returns token ids, which are the same whether they are drawn at once or in parts."""
    return [rng.randrange(VOCAB) for _ in range(n)]
