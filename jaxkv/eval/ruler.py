"""Synthetic long-context tasks modelled on RULER (Hsieh et al., arXiv 2404.06654).

The texts are not RULER's: compare scores within one study, not with tables of papers.

    niah_single      find one number that is hidden among lines of noise
    niah_multikey    the same, with further needles under other names
    niah_multivalue  find several numbers of one name
    niah_multiquery  find the numbers of several names
    vt               names are set to each other: find all names that have a value
    cwe              find the most frequent words of a list
    fwe              the same, with word frequencies that fall as 1 / rank

A sample has a text that may be compressed (`context`), a question that follows it, and the
answers. It depends only on task, length, depth and seed.
"""

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

_NAMES = """
anchor apple arrow basket beacon bottle bridge candle canyon carpet castle cellar cherry
circle copper cotton cradle desert drawer engine falcon feather forest garden glacier hammer
harbor island jacket kettle ladder lantern lemon marble meadow mirror needle orchard pebble
pencil pepper pillow pocket puzzle rabbit ribbon river saddle shadow silver spider stable
summer temple thunder timber tunnel valley velvet violin walnut window winter
"""
NAMES: tuple[str, ...] = tuple(_NAMES.split())
NOISE = (
    "The road was long and the night was quiet.",
    "Someone had left the door open again.",
    "Rain fell on the roof until morning.",
    "They talked about the weather and went home.",
    "A bell rang twice in the distance.",
)
NUM_DISTRACTORS = 3  # further needles of niah_multikey
NUM_VALUES = 3  # numbers of niah_multivalue and niah_multiquery
CHAIN = 4  # names with the same value in vt
NUM_WORDS = 3  # that cwe and fwe ask for


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
      task: name of the task.
      context: text that may be compressed.
      question: text after the context, up to where the answer begins.
      answers: strings that a right answer contains.
      depth: position of the first needle in the context, 0 to 1.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    depth: float

    def score(self, output: str) -> float:
        """Returns the fraction of the answers that an output contains; case is ignored."""
        return sum(answer.lower() in output.lower() for answer in self.answers) / len(self.answers)


Count = Callable[[str], int]


def make_sample(task: str, length: int, depth: float, seed: int, count: Count) -> Sample:
    """Makes a sample.

    Args:
      task: a name of TASKS.
      length: largest number of tokens of the context.
      depth: position of the first needle, 0 (start) to 1 (end).
      seed: seed of the names and numbers.
      count: returns the number of tokens of a text.

    Raises:
      ValueError: there is no such task, or the task does not fit into the length.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be 0 to 1, got {depth}")

    def context(size: int) -> str:
        # A new generator with the same seed draws the same names for every size.
        return TASKS[task](random.Random(f"{task} {seed}"), size, depth)[0]

    sizes = range(1, length + 1)  # a line or a word has at least one token
    fits = bisect_right(sizes, length, key=lambda size: count(context(size)))
    if not fits:
        raise ValueError(f"{task} does not fit into {length} tokens")
    text, question, answers = TASKS[task](random.Random(f"{task} {seed}"), fits, depth)
    return Sample(task, text, question, answers, depth)


Parts = tuple[str, str, tuple[str, ...]]  # context, question, answers


def _needles(rng: random.Random, size: int, depth: float, facts: list[str]) -> str:
    """Lines of noise with facts among them: the first at `depth`, the others at random lines."""
    lines = [rng.choice(NOISE) for _ in range(size)]
    places = [min(size, round(depth * size))]
    places += [rng.randrange(size + 1) for _ in facts[1:]]
    for place, fact in sorted(zip(places, facts, strict=True), reverse=True):
        lines.insert(place, fact)
    return "Remember what this text says.\n" + "\n".join(lines) + "\n"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1000, 10_000))


def _fact(name: str, number: str) -> str:
    return f"The secret number of the {name} is {number}."


def _niah_single(rng: random.Random, size: int, depth: float) -> Parts:
    return _niah(rng, size, depth, num_others=0)


def _niah_multikey(rng: random.Random, size: int, depth: float) -> Parts:
    return _niah(rng, size, depth, num_others=NUM_DISTRACTORS)


def _niah(rng: random.Random, size: int, depth: float, num_others: int) -> Parts:
    names = rng.sample(NAMES, 1 + num_others)
    numbers = [_number(rng) for _ in names]
    facts = [_fact(*pair) for pair in zip(names, numbers, strict=True)]
    question = (
        f"Question: What is the secret number of the {names[0]}?\n"
        f"Answer: The secret number of the {names[0]} is"
    )
    return _needles(rng, size, depth, facts), question, (numbers[0],)


def _niah_multivalue(rng: random.Random, size: int, depth: float) -> Parts:
    name, numbers = rng.choice(NAMES), [_number(rng) for _ in range(NUM_VALUES)]
    facts = [_fact(name, number) for number in numbers]
    question = (
        f"Question: What are all secret numbers of the {name}?\n"
        f"Answer: The secret numbers of the {name} are"
    )
    return _needles(rng, size, depth, facts), question, tuple(numbers)


def _niah_multiquery(rng: random.Random, size: int, depth: float) -> Parts:
    names = rng.sample(NAMES, NUM_VALUES)
    numbers = [_number(rng) for _ in names]
    facts = [_fact(*pair) for pair in zip(names, numbers, strict=True)]
    asked = ", the ".join(names)
    question = (
        f"Question: What are the secret numbers of the {asked}?\n"
        f"Answer: The secret numbers of the {asked} are"
    )
    return _needles(rng, size, depth, facts), question, tuple(numbers)


def _vt(rng: random.Random, size: int, depth: float) -> Parts:
    names = [name.upper() for name in rng.sample(NAMES, CHAIN)]
    number = _number(rng)
    facts = [f"Set {names[0]} to {number}."]
    facts += [f"Set {new} to what {old} is." for old, new in pairwise(names)]
    # In order, so that each name is defined before another name is set to it.
    lines = [rng.choice(NOISE) for _ in range(size)]
    first = round(depth * size)
    places = sorted([first, *[rng.randrange(min(first, size), size + 1) for _ in facts[1:]]])
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        lines.insert(place, fact)
    question = f"Question: Which names have the value {number}?\nAnswer: The names are"
    context = "Remember what is set to what.\n" + "\n".join(lines) + "\n"
    return context, question, tuple(names)


def _cwe(rng: random.Random, size: int, depth: float) -> Parts:
    words = rng.sample(NAMES, len(NAMES))
    common, others = words[:NUM_WORDS], words[NUM_WORDS:]
    drawn = [rng.choice(common if rng.random() < 0.6 else others) for _ in range(size)]
    return _listed(drawn, common)


def _fwe(rng: random.Random, size: int, depth: float) -> Parts:
    words = rng.sample(NAMES, len(NAMES))
    weights = [1 / (1 + rank) for rank in range(len(words))]
    drawn = rng.choices(words, weights, k=size)
    ranked = sorted(words, key=lambda word: -drawn.count(word))
    return _listed(drawn, ranked[:NUM_WORDS])


def _listed(drawn: list[str], answers: list[str]) -> Parts:
    question = (
        f"Question: Which {NUM_WORDS} words occur most often in the list?\n"
        f"Answer: The {NUM_WORDS} most frequent words are"
    )
    return "Here is a list of words.\n" + " ".join(drawn) + "\n", question, tuple(answers)


TASKS: dict[str, Callable[[random.Random, int, float], Parts]] = {
    "niah_single": _niah_single,
    "niah_multikey": _niah_multikey,
    "niah_multivalue": _niah_multivalue,
    "niah_multiquery": _niah_multiquery,
    "vt": _vt,
    "cwe": _cwe,
    "fwe": _fwe,
}
