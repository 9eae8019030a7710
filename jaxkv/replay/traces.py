"""Traces of real services: when requests came, how long they were, and what they shared.

Each line is a JSON object in the format of the Mooncake traces (arXiv 2407.00079):

    {"timestamp": 1500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, .., 13]}

`timestamp` is in milliseconds. `hash_ids` has one number for every 512 tokens of the prompt; equal
numbers mean that the prompts are equal up to there. Either key may be missing if it is not needed.
A trace does not hold the text, so `Expanded` makes up tokens that are shared like the numbers.
Answers are shared with no other request.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.replay.errors import ReplayError

BLOCK = 512  # tokens per hash id
LONGEST = 1 << 24
_LATEST = 10**14
_ANSWERS = 1 << 30  # token ids from here on are for answers
_MOST_BLOCKS = _ANSWERS // BLOCK


class TraceRequest(NamedTuple):
    """One request.

    Attributes:
      arrival: time of arrival in seconds.
      prompt: tokens of the prompt.
      answer: tokens of the answer.
      blocks: one number for every 512 tokens of the prompt; empty if the trace has none.
    """

    arrival: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, *, needs: str | None = None) -> list[TraceRequest]:
    """Reads a trace, and sorts it by arrival.

    Args:
      path: path of the file.
      needs: `timestamp` or `hash_ids` if that key must be given. Without time stamps all requests
        come at once; without hash ids they share nothing.

    Raises:
      ReplayError: the file has no request, or a line is not a request or has no `needs`; the
        message names the line.
      OSError: the file cannot be read.
    """
    requests = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    requests.append(_request(json.loads(line), needs))
                except (ValueError, RecursionError) as error:
                    reason = str(error).partition("\n")[0]
                    raise ReplayError(f"{path}: line {number}: {reason}") from None
    if not requests:
        raise ReplayError(f"{path}: has no request")
    return sorted(requests, key=lambda request: request.arrival)


class Expanded:
    """Packed prompts and answers, whose tokens are equal where the numbers of the blocks are.

    Each iteration makes the tokens again, since all of them may not fit into memory. A request
    without blocks shares nothing. Answers have at least one token and are shared with no other.
    """

    def __init__(self, trace: Sequence[TraceRequest]):
        """Takes the requests of a trace.

        Raises:
          ReplayError: there are more blocks than token ids for them.
        """
        self._trace = trace
        self._numbers: dict[int, int] = {}
        for request in trace:
            for block in request.blocks:
                self._numbers.setdefault(block, len(self._numbers))
        if len(self._numbers) > _MOST_BLOCKS:
            raise ReplayError(f"{len(self._numbers)} blocks: a trace may have {_MOST_BLOCKS}")

    def __len__(self) -> int:
        return len(self._trace)

    def __contains__(self, request: object) -> bool:
        return any(request == one for one in self)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        fresh, within = 0, np.arange(BLOCK, dtype=np.int64)
        for request in self._trace:
            blocks = np.array([self._numbers[block] for block in request.blocks], np.int64)
            tokens = (blocks[:, None] * BLOCK + within).reshape(-1)[: request.prompt]
            num_fresh = request.prompt - len(tokens) + request.answer
            made = _ANSWERS + (fresh + np.arange(num_fresh)) % _ANSWERS
            fresh += num_fresh
            tokens = np.concatenate([tokens, made]).astype(np.int32)
            yield tokens[: request.prompt].tobytes(), tokens[request.prompt :].tobytes()


def _request(raw: Any, needs: str | None) -> TraceRequest:
    """Returns the request of a parsed line.

    Raises:
      ReplayError: the line is not a request, or has no `needs`.
    """
    if not isinstance(raw, dict):
        raise ReplayError("is not a JSON object")
    if needs is not None and raw.get(needs) in (None, []):
        raise ReplayError(f"has no {needs}")
    blocks = raw.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(x) is int and x >= 0 for x in blocks):
        raise ReplayError("hash_ids must be a list of whole numbers")
    prompt, answer = _length(raw, "input_length", 1), _length(raw, "output_length", 0)
    arrival = raw.get("timestamp", 0)
    is_number = isinstance(arrival, int | float) and not isinstance(arrival, bool)
    if not is_number or not 0 <= arrival <= _LATEST:
        raise ReplayError(f"timestamp = {arrival!r} must be 0 to {_LATEST} milliseconds")
    if blocks and not (len(blocks) - 1) * BLOCK < prompt <= len(blocks) * BLOCK:
        raise ReplayError(f"{len(blocks)} hash_ids do not cover {prompt} tokens, {BLOCK} each")
    return TraceRequest(arrival / 1e3, prompt, max(1, answer), tuple(blocks))


def _length(raw: dict[str, Any], name: str, least: int) -> int:
    value = raw.get(name)
    if value is None:
        raise ReplayError(f"has no {name}")
    if type(value) is not int or not least <= value <= LONGEST:
        raise ReplayError(f"{name} = {value!r} must be {least} to {LONGEST} tokens")
    return value
