"""Time conversations of several turns, with the prefix index and without it.

  python scripts bench chat
  python scripts bench chat --one-by-one --json
  python scripts bench chat --conversations 4 --system 2048 --page-size 64

Several conversations share a system prompt. In each turn a conversation gets random user tokens
and generates an answer of a fixed length, greedily. All conversations of a turn are served in
one batch, or one request after another. Every prompt is the whole conversation so far: the part
that the index does not have is computed again. Time to first token is counted from the moment at
which a request is submitted; the table shows the median of each turn.

If `llama-cpp-python` is installed and the model is a GGUF file, llama.cpp runs on the same weights
in float32, with its prompt cache and without. It serves one request after another.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.arith import round_up
from jaxkv.cli import console
from jaxkv.engine import EngineConfig
from jaxkv.errors import UsageError
from scripts.bench.chat_systems import Answer, JaxkvServer, LlamaServer, Server
from scripts.bench.peers import write_float32_gguf

MICRO = 1e6


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The conversations.

    Attributes:
      conversations, turns: number of conversations, and of turns in each.
      system, user, new: tokens of the shared prompt, of a user's turn and of an answer.
      one_by_one: serve one request after another, not all of a turn together.
    """

    conversations: int = 8
    turns: int = 5
    system: int = 512
    user: int = 48
    new: int = 32
    one_by_one: bool = False

    @property
    def longest(self) -> int:
        """Number of tokens of a conversation at its end."""
        return self.system + self.turns * (self.user + self.new)

    def texts(self, vocab_size: int, seed: int) -> tuple[list[int], list[list[list[int]]]]:
        """Returns the system prompt and the users' `[turns, conversations, user]` token ids."""
        rng = np.random.default_rng(seed)
        low, high = vocab_size // 4, vocab_size // 2  # avoids control tokens and padding
        shape = (self.turns, self.conversations, self.user)
        return rng.integers(low, high, self.system).tolist(), rng.integers(
            low, high, shape
        ).tolist()


@dataclass
class Figures:
    """Results of one system in one round.

    Attributes:
      seconds: total time.
      prefilled_tokens: prompt tokens that were computed.
      generated_tokens: tokens of answers.
      hit_rate: share of the prompts' tokens that were not computed.
      first_token_seconds: median time to first token in each turn.
      host_us_per_decode_step: median host time in microseconds; None if unknown.
      tokens: all answers, not reported.
    """

    seconds: float = 0.0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    hit_rate: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    host_us_per_decode_step: float | None = None
    tokens: list[list[int]] = field(default_factory=list)


def converse(
    server: Server, workload: Workload, vocab_size: int, seed: int, served: Callable[[int], object]
) -> Figures:
    """Runs the conversations from an empty cache; `served` gets the number of ended requests."""
    system, questions = workload.texts(vocab_size, seed)
    talks = [list(system) for _ in range(workload.conversations)]
    figures, prompt_tokens, cached_tokens = Figures(), 0, 0
    server.forget()
    start = time.perf_counter()
    for asked in questions:
        for talk, question in zip(talks, asked, strict=True):
            talk += question
        prompt_tokens += sum(map(len, talks))
        answers: list[Answer] = []
        for batch in [[talk] for talk in talks] if workload.one_by_one else [talks]:
            answers += server.serve(batch, workload.new)
            served(len(batch))
        for talk, answer in zip(talks, answers, strict=True):
            talk += answer.tokens
            figures.generated_tokens += len(answer.tokens)
            figures.tokens.append(answer.tokens)
        cached_tokens += sum(answer.cached_tokens for answer in answers)
        first = statistics.median(answer.first_token_seconds for answer in answers)
        figures.first_token_seconds.append(first)
    figures.seconds = time.perf_counter() - start
    figures.prefilled_tokens = prompt_tokens - cached_tokens
    figures.hit_rate = cached_tokens / prompt_tokens
    if server.host_seconds:
        figures.host_us_per_decode_step = statistics.median(server.host_seconds) * MICRO
    return figures


WITH, WITHOUT = "jaxkv, index", "jaxkv, no index"
PEER_WITH, PEER_WITHOUT = "llama.cpp F32, prompt cache", "llama.cpp F32"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The command line."""

    workload: Workload
    model: console.ModelOptions
    page_size: int
    rounds: int
    no_peers: bool
    json: bool


def parse(argv: list[str]) -> BenchOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts bench chat", __doc__)
    add = parser.add_argument
    add("--conversations", type=int, default=8, metavar="C", help="(default: %(default)s)")
    add("--turns", type=int, default=5, metavar="N", help="turns of each (default: %(default)s)")
    add("--system", type=int, default=512, metavar="N", help="shared tokens (default: 512)")
    add("--user", type=int, default=48, metavar="N", help="tokens per user's turn (default: 48)")
    add("--new", type=int, default=32, metavar="N", help="tokens per answer (default: 32)")
    add("--one-by-one", action="store_true", help="one request after another, not a turn at once")
    console.add_model_arguments(parser)
    add("--page-size", type=int, default=16, metavar="P", help="tokens per page (default: 16)")
    add("--rounds", type=int, default=1, metavar="N", help="timed rounds (default: %(default)s)")
    add("--no-peers", action="store_true", help="time jaxkv only")
    add("--json", action="store_true", help="one JSON object on standard output")
    options = parser.read(BenchOptions, argv)
    sizes = ("conversations", "turns", "system", "user", "new")
    parser.require_at_least(options.workload, **dict.fromkeys(sizes, 1))
    parser.require_at_least(options, rounds=1, page_size=1)
    return options


def main(argv: list[str]) -> int:
    """Runs the bench and prints its table."""
    options = parse(argv)
    workload = options.workload
    config = engine_config(workload, options.page_size)  # raises before a model is loaded
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    if workload.longest > loaded.model.max_positions:
        raise UsageError(
            f"a conversation has up to {workload.longest} tokens; {loaded.name} takes "
            f"{loaded.model.max_positions}: lower --turns, --system, --user or --new"
        )
    ours = {
        name: JaxkvServer(loaded.model, replace(config, prefix_cache=name == WITH))
        for name in (WITH, WITHOUT)
    }
    for server in ours.values():
        server.warm_up()
    num_shapes = {name: server.num_shapes for name, server in ours.items()}
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[str, Server] = dict(ours)
        if not options.no_peers:
            servers |= peers(loaded.source, Path(folder), workload)
        rounds = run_rounds(servers, workload, loaded.model.vocab_size, options.rounds)
    late = sum(server.num_shapes - num_shapes[name] for name, server in ours.items())
    if late:
        print(f"{late} shapes of steps were compiled in timed rounds", file=sys.stderr)
    report = summary(workload, rounds)
    print(json.dumps(report) if options.json else table(report))
    return 0


def engine_config(workload: Workload, page_size: int) -> EngineConfig:
    """Returns a configuration with room for all whole conversations, even without sharing."""
    length = round_up(workload.longest, page_size)
    return EngineConfig(
        max_sequences=1 if workload.one_by_one else workload.conversations,
        page_size=page_size,
        pool_tokens=workload.conversations * length,
    )


def peers(source: Path, folder: Path, workload: Workload) -> dict[str, Server]:
    """Returns llama.cpp with and without its prompt cache, if it can run."""
    if source.suffix != ".gguf" or importlib.util.find_spec("llama_cpp") is None:
        return {}
    path = folder / "float32.gguf"
    write_float32_gguf(source, path)
    num, longest = workload.conversations, workload.longest
    return {
        name: LlamaServer(path, conversations=num, longest=longest, reuse=name == PEER_WITH)
        for name in (PEER_WITH, PEER_WITHOUT)
    }


def run_rounds(
    servers: Mapping[str, Server], workload: Workload, vocab_size: int, num_rounds: int
) -> list[dict[str, Figures]]:
    """Runs every system in turn, round after round; each round has other texts."""
    rounds = []
    total = len(servers) * num_rounds * workload.turns * workload.conversations
    with console.progress(total, unit="request", description="timing") as bar:
        for seed in range(num_rounds):
            rounds.append(
                {
                    name: converse(server, workload, vocab_size, seed, bar.update)
                    for name, server in servers.items()
                }
            )
    return rounds


def summary(workload: Workload, rounds: list[dict[str, Figures]]) -> dict[str, Any]:
    """Returns medians over the rounds, what the index saves, and the number of equal answers."""
    systems = {name: _medians([figures[name] for figures in rounds]) for name in rounds[0]}
    with_index, without = systems[WITH], systems[WITHOUT]
    equal = sum(
        a == b
        for figures in rounds
        for a, b in zip(figures[WITH].tokens, figures[WITHOUT].tokens, strict=True)
    )
    return {
        "workload": asdict(workload),
        "rounds": len(rounds),
        "systems": systems,
        "seconds_ratio": with_index["seconds"] / without["seconds"],
        "last_first_token_ratio": with_index["first_token_seconds"][-1]
        / without["first_token_seconds"][-1],
        "equal_answers": [equal, len(rounds) * len(rounds[0][WITH].tokens)],
    }


def _medians(rounds: list[Figures]) -> dict[str, Any]:
    host = [f.host_us_per_decode_step for f in rounds if f.host_us_per_decode_step is not None]
    per_turn = zip(*(figures.first_token_seconds for figures in rounds), strict=True)
    return {
        "seconds": statistics.median(figures.seconds for figures in rounds),
        "prefilled_tokens": statistics.median(figures.prefilled_tokens for figures in rounds),
        "generated_tokens": statistics.median(figures.generated_tokens for figures in rounds),
        "hit_rate": statistics.median(figures.hit_rate for figures in rounds),
        "first_token_seconds": [statistics.median(turn) for turn in per_turn],
        "host_us_per_decode_step": statistics.median(host) if host else None,
    }


def table(report: dict[str, Any]) -> str:
    """Returns a summary as Markdown, and one line that compares with and without the index."""
    turns = report["workload"]["turns"]
    lines = [
        "| | total s | prefilled | generated | hit rate | first token, turn 1, s "
        f"| turn {turns}, s | host us per decode step |",
        "|---" * 8 + "|",
    ]
    for name, row in report["systems"].items():
        host, first = row["host_us_per_decode_step"], row["first_token_seconds"]
        cells = [
            name,
            f"{row['seconds']:.2f}",
            f"{row['prefilled_tokens']:.0f}",
            f"{row['generated_tokens']:.0f}",
            f"{row['hit_rate']:.1%}",
            f"{first[0]:.3f}",
            f"{first[-1]:.3f}",
            "-" if host is None else f"{host:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    equal, answers = report["equal_answers"]
    lines += [
        "",
        f"with the index: {report['seconds_ratio']:.3f} of the time, "
        f"{report['last_first_token_ratio']:.3f} of the wait for the first token of turn {turns}; "
        f"{equal} of {answers} answers are equal",
    ]
    return "\n".join(lines)
