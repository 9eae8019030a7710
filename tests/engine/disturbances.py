"""What is done to a running engine between steps, and what its answers are compared by."""

from collections.abc import Callable

import numpy as np

from jaxkv.engine import Completion, Engine

Disturb = Callable[[Engine, int], None]


def preempt_at(step: int) -> Disturb:
    """Takes the rows of all running sequences away before one step."""

    def disturb(engine: Engine, number: int) -> None:
        if number == step:
            for sequence in reversed(engine._scheduler.running):
                engine._scheduler.preempt(sequence)

    return disturb


def logit_bits(completions: list[Completion]) -> list[np.ndarray]:
    return [np.stack(completion.logits).view(np.uint32) for completion in completions]
