"""What a step tells about tokens besides the tokens, for the requests that ask for it."""

import jax
import numpy as np

from jaxkv.engine.completion import TokenLogprob
from jaxkv.engine.sampling import Sampled
from jaxkv.engine.sequence import Sequence
from jaxkv.engine.step import StepFunctions, StepResult
from jaxkv.engine.step_plan import StepPlan


def book_logprobs(sequence: Sequence, row: int, sampled: Sampled, logits: jax.Array) -> None:
    """Adds the log-probabilities and logits of the token in `row` of a step to the completion."""
    n, completion = sequence.request.logprobs, sequence.completion
    if n is not None:
        top_tokens, top_logprobs = sampled.top_tokens[row, :n], sampled.top_logprobs[row, :n]
        top = tuple(zip(top_tokens.tolist(), top_logprobs.tolist(), strict=True))
        logprob = TokenLogprob(int(sampled.token[row]), float(sampled.logprob[row]), top)
        completion.logprobs.append(logprob)
    if sequence.request.keep_logits:
        completion.logits.append(np.array(logits[row]))


def book_prompt_logprobs(plan: StepPlan, result: StepResult, steps: StepFunctions) -> None:
    """Writes the log-probabilities of prompt tokens to the completions.

    The hidden state of a row gives the distribution of the next token. A chunk of a prompt
    therefore gives the log-probabilities of its tokens but the first, and of the first token
    after it.
    """
    if not [True for sequence in plan.sequences if sequence.request.prompt_logprobs]:
        return
    targets = np.zeros(result.hidden.shape[0], np.int32)
    spans = []
    row = 0
    ends = plan.lengths.tolist()
    for sequence, num_tokens, end in zip(plan.sequences, plan.num_tokens, ends, strict=True):
        request, completion = sequence.request, sequence.completion
        first = end - num_tokens + 1  # position of the first target
        labels = request.prompt[first : first + num_tokens]
        skipped = max(0, request.prompt_logprobs_from - first)  # these were not asked for
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
