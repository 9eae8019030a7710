r"""Talk to a model that remembers the conversation, and see what the prefix index saves.

  jaxkv chat
  jaxkv chat --system "Answer like a pirate." --temperature 0.7
  jaxkv chat --demo                    # a fixed talk of five turns, and its trace
  printf 'Hello!\nWhat did I say?\n' | jaxkv chat

Each turn's prompt is the whole conversation so far. After the answer, a line on standard error
tells how much of the prompt was cached (hit) and how much was computed again, and the time to the
first token: of this turn, and of the same prompt served once more by an engine without the index
(`--no-compare` leaves that out).

At the prompt: /tree shows the radix tree, /reset starts a new conversation, /help tells more.
Where standard input is no terminal, each of its lines is a turn.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import (
    add_format_arguments,
    add_sampling_arguments,
    kv_ranges,
    page_size,
    sampling_params,
)
from jaxkv.cli.conversation import (
    DEMO_SYSTEM,
    DEMO_TURNS,
    Conversation,
    Talker,
    Turn,
)
from jaxkv.cli.output.tree_view import as_text, view
from jaxkv.engine import EngineConfig, PoolState, Request, RequestError
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel

HELP = """\
/tree   the radix tree of what is cached: tokens, pages, holders, hits, ages; * is shared
/reset  starts a new conversation; what the old one computed stays cached
/quit   ends, as Ctrl-D does
/help   this list
Anything else is your turn in the conversation."""


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the arguments."""
    parser = console.Parser("jaxkv chat", __doc__)
    add = parser.add_argument
    add("--demo", action="store_true", help="hold the fixed talk, greedily, and print its trace")
    console.add_model_arguments(parser)
    add("--system", metavar="TEXT", help="system message")
    add("--max-new-tokens", type=int, metavar="N", help="an answer (default: 256; demo: 48)")
    add("--no-compare", action="store_true", help="don't measure what no index would take")
    add_sampling_arguments(parser, "turn")
    cache = parser.add_argument_group("cache")
    add = cache.add_argument
    add("--pool-tokens", type=int, default=2048, metavar="N", help="the cache (default: 2048)")
    add("--chunk", type=int, default=64, metavar="T", help="most tokens a step (default: 64)")
    add_format_arguments(parser)
    args = parser.parse_args(argv)
    if args.max_new_tokens is None:
        args.max_new_tokens = 48 if args.demo else 256
    if args.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    if args.demo and (args.system is not None or args.temperature):
        parser.error("--demo has a system message of its own, and is greedy")
    return args


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The sizes and choices of the command line."""
    return EngineConfig(
        max_sequences=1,
        token_budget=args.chunk,
        page_size=page_size(args),
        pool_tokens=args.pool_tokens,
        kv_format=args.kv_format,
        kv_ranges=kv_ranges(args),
    )


class Chat:
    """A conversation at the terminal, and the engine under it.

    Attributes:
      turns: of this conversation.
    """

    def __init__(self, loaded: LoadedModel, args: argparse.Namespace, system: str | None):
        self._args, self._system = args, system
        self._tokenizer = loaded.require_tokenizer()
        self._talker = Talker(loaded, engine_config(args), compare=not args.no_compare)
        self.reset()

    def warm_up(self) -> None:
        """Leaves nothing to compile in a turn."""
        self._talker.warm_up()

    def reset(self) -> None:
        """Starts a new conversation."""
        self._conversation = Conversation(self._tokenizer, self._system)
        self.turns: list[Turn] = []

    def say(self, text: str) -> None:
        """Takes a turn: prints the answer as it is made, and on stderr what it cost.

        Raises:
          ModelError: the text cannot be encoded.
          RequestError: the conversation has outgrown the context.
        """
        talk = self._conversation
        prompt = talk.prompt(text)
        request = Request(
            prompt=tuple(prompt),
            max_new_tokens=self._args.max_new_tokens,
            sampling=sampling_params(self._args, talk.num_turns),
            stop_ids=self._tokenizer.stop_ids,
            stop_strings=talk.stop_strings,
        )
        completion, turn = self._talker.say(request, lambda text: print(text, end="", flush=True))
        print(flush=True)
        talk.add(text, prompt, completion)
        self.turns.append(turn)
        print(turn_line(len(self.turns), turn), file=sys.stderr)

    def tree(self) -> str:
        """The radix tree as text."""
        index = self._talker.engine.index
        assert index is not None
        return as_text(
            view(index, lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False))
        )


def turn_line(number: int, turn: Turn) -> str:
    """A turn's figures, in one line."""
    without = ""
    if turn.uncached_seconds is not None:
        without = f", {turn.uncached_seconds:.3f} s without the index"
    return (
        f"[turn {number}: prompt {turn.prompt_tokens} = {turn.cached_tokens} hit + "
        f"{turn.recomputed_tokens} recomputed; {turn.generated_tokens} generated; "
        f"first token {turn.first_token_seconds:.3f} s{without}]"
    )


def trace(turns: Sequence[Turn]) -> str:
    """All turns as a table, and what the index saved."""
    head = (
        *("turn", "prompt", "hit", "recomputed", "generated", "hit rate", "first token, s"),
        *("without index, s", "pages free/cached/held"),
    )
    rows: list[tuple[str, ...]] = [head]
    for number, turn in enumerate(turns, 1):
        counts = turn.prompt_tokens, turn.cached_tokens, turn.recomputed_tokens
        rows.append(
            (
                *map(str, (number, *counts, turn.generated_tokens)),
                f"{turn.hit_rate:.1%}",
                f"{turn.first_token_seconds:.3f}",
                _seconds(turn.uncached_seconds),
                " + ".join(map(_pages, turn.pools)),
            )
        )
    prompt = sum(turn.prompt_tokens for turn in turns)
    hit = sum(turn.cached_tokens for turn in turns)
    without = [turn.uncached_seconds for turn in turns if turn.uncached_seconds is not None]
    rows.append(
        (
            *("sum", str(prompt), str(hit), str(prompt - hit)),
            str(sum(turn.generated_tokens for turn in turns)),
            f"{hit / prompt:.1%}",
            f"{sum(turn.first_token_seconds for turn in turns):.3f}",
            _seconds(sum(without) if len(without) == len(turns) else None),
            "",
        )
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    saved = (
        f"{hit} of {prompt} prompt tokens were not computed again: {hit / prompt:.1%} of prefill"
    )
    return "\n".join([*lines, saved])


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _pages(pool: PoolState) -> str:
    return f"{pool.free}/{pool.cached}/{pool.held}"


def typed_lines() -> Iterator[str]:
    """What the user types, or the lines of standard input, without blank ones."""
    if sys.stdin is None:
        raise ModelError("there is nobody to talk to: standard input is closed")
    for line in _asked() if sys.stdin.isatty() else _piped():
        if line.strip():
            yield line.strip()


def _asked() -> Iterator[str]:
    with suppress(ImportError):  # where it is there, `input` edits lines and recalls them
        importlib.import_module("readline")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"line {number}, byte {error.start}"
            raise ModelError(f"standard input: not UTF-8 text, at {where}") from None


def converse(chat: Chat, lines: Iterable[str]) -> int:
    """Takes turns and commands until they end; returns the exit code.

    What is wrong with a turn is one line, and the conversation goes on.
    """
    code = 0
    for line in lines:
        if line == "/quit":
            break
        elif line == "/help":
            print(HELP)
        elif line == "/tree":
            print(chat.tree())
        elif line == "/reset":
            chat.reset()
            print("a new conversation")
        elif line.startswith("/"):
            code = _complain(f"no command is named {line.split()[0]}: /help lists them")
        else:
            try:
                chat.say(line)
            except (ModelError, RequestError) as error:
                code = _complain(str(error))
    return 0 if sys.stdin.isatty() else code


def _complain(line: str) -> int:
    print(line, file=sys.stderr)
    return console.EXIT_USER_ERROR


def main(argv: list[str]) -> int:
    """Talks; returns 2 where a line of a file was wrong."""
    args = parse(argv)
    sampling_params(args, 0)  # raises for bad options, before a model is loaded
    engine_config(args)
    console.enable_compilation_cache()
    loaded = console.load_model(args)
    chat = Chat(loaded, args, DEMO_SYSTEM if args.demo else args.system)
    print("compiling, or taking from the cache what was compiled before", file=sys.stderr)
    chat.warm_up()
    if not args.demo:
        if sys.stdin is not None and sys.stdin.isatty():
            print(f"{loaded.name} listens: /help tells the commands, Ctrl-D ends", file=sys.stderr)
        return converse(chat, typed_lines())
    print(f"system: {DEMO_SYSTEM}")
    for text in DEMO_TURNS:
        print(f"\n> {text}", flush=True)
        chat.say(text)
    print(f"\n{trace(chat.turns)}")
    return 0
