"""Log-probabilities of prompt tokens, for the requests that ask for them.

A row's hidden state gives the distribution of the token after it, so that a chunk of a prompt fills
in those of its tokens and of the first one behind it.
"""

import numpy as np

from jaxkv.engine.scheduler import StepPlan
from jaxkv.engine.step import StepFunctions, StepResult


def book_prompt_logprobs(plan: StepPlan, result: StepResult, steps: StepFunctions) -> None:
    """Fills in the log-probabilities of the prompt tokens that follow those of a step.

    Called before the plan's sequences have advanced.
    """
    prompts = [sequence for sequence in plan.sequences if sequence.in_prompt]
    if all(sequence.completion.prompt_logprobs is None for sequence in prompts):
        return
    targets = np.zeros(result.hidden.shape[0], np.int32)
    spans = []
    row = 0
    for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
        first = sequence.num_computed + 1  # position of the first target
        labels = sequence.request.prompt[first : first + num_tokens]
        completion = sequence.completion
        # What comes before was not asked for, computed or not.
        skipped = max(0, sequence.request.prompt_logprobs_from - first)
        if completion.prompt_logprobs is not None and len(labels) > skipped:
            targets[row : row + len(labels)] = labels
            wanted = slice(first + skipped, first + len(labels))
            spans.append((completion, wanted, row + skipped))
        row += num_tokens
    if not spans:
        return
    logprobs, greedy = steps.prompt_logprobs(result.hidden, targets)
    for completion, wanted, row in spans:
        rows = slice(row, row + wanted.stop - wanted.start)
        completion.prompt_logprobs[wanted] = logprobs[rows]
        completion.prompt_greedy[wanted] = greedy[rows]
