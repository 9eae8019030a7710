r"""Talk to a model that remembers the conversation, and see what the prefix index saves.

  jaxkv chat
  jaxkv chat --system "Answer like a pirate." --temperature 0.7
  jaxkv chat --demo                    # a fixed conversation of five turns, and its trace
  jaxkv chat --demo --plot hits.svg    # draws which tokens of each prompt were cached
  printf 'Hello!\nWhat did I say?\n' | jaxkv chat

The prompt of each turn is the whole conversation so far. After the answer, a line on standard error
tells how many of its tokens were cached (hit) and how many were computed again, and the time to the
first token: of this turn, and of the same prompt on an engine without the prefix index
(`--no-compare` leaves the second one out).

At the prompt, /tree shows the radix tree, /reset starts a new conversation, and /help lists all
commands. If standard input is not a terminal, each of its lines is a turn.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import (
    FormatOptions,
    SamplingOptions,
    add_format_arguments,
    add_sampling_arguments,
)
from jaxkv.cli.output import plots, tables
from jaxkv.cli.output.tree_view import as_text, view
from jaxkv.cli.talk import DEMO_SYSTEM, DEMO_TURNS, Talker, Turn, trace, turn_line
from jaxkv.conversation import Conversation
from jaxkv.engine import EngineConfig
from jaxkv.errors import JaxkvError, UsageError
from jaxkv.llm import LLM

HELP = """\
/tree   show the radix tree of what is cached: tokens, pages, holders, hits, ages; * is shared
/reset  start a new conversation; what the old one computed stays cached
/quit   end, as Ctrl-D does
/help   show this list
Anything else is your turn in the conversation."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The command line."""

    demo: bool
    model: console.ModelOptions
    system: str | None
    max_new_tokens: int | None
    no_compare: bool
    plot: Path | None
    sampling: SamplingOptions
    pool_tokens: int
    chunk: int
    formats: FormatOptions

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer."""
        if self.max_new_tokens is None:
            return 48 if self.demo else 256
        return self.max_new_tokens

    def config(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        return dict(
            max_sequences=1,
            token_budget=self.chunk,
            page_size=self.formats.tokens_per_page(),
            pool_tokens=self.pool_tokens,
            kv_format=self.formats.kv_format,
            kv_ranges=self.formats.ranges(),
        )

    def check(self) -> None:
        """Raises JaxkvError for an option that no turn could be served with."""
        self.sampling.params(0)
        EngineConfig(**self.config())


def parse(argv: list[str]) -> ChatOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv chat", __doc__)
    add = parser.add_argument
    add("--demo", action="store_true", help="hold the fixed conversation and print its trace")
    console.add_model_arguments(parser)
    add("--system", metavar="TEXT", help="system message")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer (default: 256; demo: 48)",
    )
    add("--no-compare", action="store_true", help="do not time the turns without the index")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="with --demo: draw the cached and computed tokens of each turn into a .png or .svg",
    )
    add_sampling_arguments(parser, "turn")
    cache = parser.add_argument_group("cache")
    add = cache.add_argument
    add(
        "--pool-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens that the cache holds (default: 2048)",
    )
    add("--chunk", type=int, default=64, metavar="T", help="most tokens per step (default: 64)")
    add_format_arguments(cache)
    options = parser.read(ChatOptions, argv)
    if options.answer_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    if options.demo and (options.system is not None or options.sampling.temperature):
        parser.error("--demo has a system message of its own and always takes the likeliest token")
    if options.plot is not None and not options.demo:
        parser.error("--plot draws the turns of --demo")
    tables.check_file(parser, options.plot, "--plot", (".png", ".svg"))
    if options.plot is not None:
        plots.require()
    return options


class Chat:
    """A conversation at the terminal.

    Attributes:
      turns: the turns of this conversation.
    """

    def __init__(self, llm: LLM, options: ChatOptions, system: str | None):
        self._llm, self._options, self._system = llm, options, system
        self._talker = Talker(llm, compare=not options.no_compare)
        self.reset()

    def reset(self) -> None:
        """Starts a new conversation."""
        self._conversation = Conversation(self._llm.tokenizer).with_system(self._system)
        self.turns: list[Turn] = []

    def say(self, text: str) -> None:
        """Takes a turn: prints the answer as it is generated, and on stderr what it cost.

        Raises:
          ModelError: the text cannot be encoded.
          RequestError: the conversation has become too long.
        """
        talk = self._conversation
        prompt = talk.prompt(text)
        request = self._llm.request(
            prompt,
            self._options.sampling.params(talk.num_turns),
            max_new_tokens=self._options.answer_tokens,
            stop_strings=talk.stop_strings,
        )
        answer, turn = self._talker.say(request, lambda text: print(text, end="", flush=True))
        print(flush=True)
        self._conversation = talk.answered(text, prompt, answer.tokens, answer.text)
        self.turns.append(turn)
        print(turn_line(len(self.turns), turn), file=sys.stderr)

    def tree(self) -> str:
        """The radix tree as text."""
        index, tokenizer = self._llm.engine.index, self._llm.tokenizer
        assert index is not None
        return as_text(view(index, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)))


def typed_lines() -> Iterator[str]:
    """What the user types, or the lines of standard input, without blank ones."""
    if sys.stdin is None:
        raise UsageError("there is no turn to answer: standard input is closed")
    for line in _asked() if sys.stdin.isatty() else _piped():
        if line.strip():
            yield line.strip()


def _asked() -> Iterator[str]:
    with suppress(ImportError):  # if it is installed, `input` can edit and recall lines
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
            raise UsageError(f"standard input: not UTF-8 text, at {where}") from None


def converse(chat: Chat, lines: Iterable[str]) -> int:
    """Takes turns and commands until they end; returns the exit code.

    An error in a turn is printed as one line, and the conversation goes on.
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
            except JaxkvError as error:
                code = _complain(str(error))
    return 0 if sys.stdin.isatty() else code


def _complain(line: str) -> int:
    print(line, file=sys.stderr)
    return console.EXIT_USER_ERROR


def demonstrate(chat: Chat, plot: Path | None) -> None:
    """Holds the fixed conversation, prints its trace, and draws it if there is a file for it."""
    print(f"system: {DEMO_SYSTEM}")
    for text in DEMO_TURNS:
        print(f"\n> {text}", flush=True)
        chat.say(text)
    print(f"\n{trace(chat.turns)}")
    if plot is not None:
        counts = [(turn.cached_tokens, turn.recomputed_tokens) for turn in chat.turns]
        plots.save(plots.turns(counts), plot)


def main(argv: list[str]) -> int:
    """Talks; returns 2 if a line of piped input was wrong."""
    options = parse(argv)
    options.check()
    console.enable_compilation_cache()
    llm = LLM(console.load_model(options.model), **options.config())
    chat = Chat(llm, options, DEMO_SYSTEM if options.demo else options.system)
    print("compiling, or loading what was compiled before", file=sys.stderr)
    llm.warm_up()
    if options.demo:
        demonstrate(chat, options.plot)
        return 0
    if sys.stdin is not None and sys.stdin.isatty():
        name = llm.loaded.name
        print(f"{name} is ready: /help lists the commands, Ctrl-D ends", file=sys.stderr)
    return converse(chat, typed_lines())
