"""Several streams of answers on one engine: a step serves all, and each takes what is its own."""

from collections import deque
from collections.abc import Generator, Iterable
from typing import Protocol

from jaxkv.engine.request import Completion, Delta, Request


class Server(Protocol):
    """What streams ask of an engine."""

    def submit_or_refuse(self, request: Request) -> Completion: ...

    def step(self) -> list[Delta]: ...

    def abort(self, request_id: int) -> None: ...


class Streams:
    """The open streams of an engine; whichever is asked for more runs the next step."""

    def __init__(self) -> None:
        self._parked: dict[int, deque[Delta]] = {}  # of the stream that a request belongs to

    def serve(
        self, engine: Server, requests: Iterable[Request], answers: list[Completion]
    ) -> Generator[Delta, None, None]:
        """Submits requests, adding the completion of each to `answers`, and steps to their end.

        Yields:
          What each step adds to them and to their samples. Leaving early aborts what is unfinished.
        """
        served: list[Completion] = []
        parked: deque[Delta] = deque()
        try:
            for request in requests:
                completion = engine.submit_or_refuse(request)
                answers.append(completion)
                own = [completion, *completion.samples]
                served += own
                self._parked |= {one.request_id: parked for one in own}
                if completion.error is not None:
                    yield Delta(completion, (), "")
            while True:
                while parked:
                    yield parked.popleft()
                if all(completion.finish_reason is not None for completion in served):
                    return
                for delta in engine.step():
                    if delta.completion.request_id in self._parked:
                        self._parked[delta.completion.request_id].append(delta)
        finally:
            for completion in served:
                engine.abort(completion.request_id)
                self._parked.pop(completion.request_id, None)
