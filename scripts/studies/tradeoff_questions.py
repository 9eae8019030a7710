"""The questions that all rows of `tradeoff` answer. This module is not a command."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from jaxkv.eval.ruler import Sample, make_sample
from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer import Tokenizer
from scripts.studies.tradeoff_rows import DEPTHS

ANSWER_TOKENS = 8  # tokens for each text that an answer should have


@dataclass(frozen=True)
class Question:
    """A sample of a task, as tokens.

    Attributes:
      sample: the sample of the task.
      length: largest number of tokens of the context.
      seed: seed of the sample.
      context: tokens of which some may be evicted.
      question: the tokens after them.
    """

    sample: Sample
    length: int
    seed: int
    context: list[int]
    question: list[int]

    @property
    def max_new_tokens(self) -> int:
        """Largest number of tokens of an answer."""
        return ANSWER_TOKENS * len(self.sample.answers)


def questions(
    tokenizer: Tokenizer,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    most: int,
) -> Iterator[Question]:
    """Returns the questions of all tasks, lengths, depths and seeds, in `most` positions.

    Raises:
      ModelError: a length is too short for a task, or too long for the models.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    for length, task, depth, i in product(lengths, tasks, DEPTHS, range(samples)):
        try:
            sample = make_sample(task, length, depth, seed + i, count)
        except ValueError as error:
            raise ModelError(f"--lengths {length}: {error}") from None
        context = tokenizer.encode(sample.context)
        question = tokenizer.encode(sample.question, add_special_tokens=False)
        found = Question(sample, length, seed + i, context, question)
        n = len(context) + len(question) + found.max_new_tokens
        if n > most:
            raise ModelError(
                f"--lengths {length}: {task} has {n} tokens; the model takes {most} at most"
            )
        yield found
