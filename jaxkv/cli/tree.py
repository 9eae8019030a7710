"""Show the radix tree that a prefix index makes of prompts.

  jaxkv tree                            # of a conversation of five turns
  jaxkv tree "The sea is blue." "The sea is deep."
  jaxkv tree --prompts questions.txt --while-running --svg tree.svg

Prompts are arguments or lines of a file. They are used as they are, without a chat template, and
are served together. Without prompts, the conversation of `chat --demo` is held. A node of the tree
is a run of tokens with which everything below it begins. It is shown with its positions, its pages
in the pool, how many sequences hold them, how often it was matched or inserted, and how long ago;
`*` marks what several sequences begin with.

The tree is shown after all requests have ended; it contains their answers, and no page is held.
`--while-running` shows it when all prompts are computed and still held.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import prompt_lines
from jaxkv.cli.output.tree_view import as_svg, as_text, view
from jaxkv.cli.talk import DEMO_SYSTEM, DEMO_TURNS
from jaxkv.conversation import Conversation
from jaxkv.engine import Completion, Engine, EngineConfig, Request
from jaxkv.errors import UsageError
from jaxkv.llm import LLM

MAX_SEQUENCES = 16  # served at once


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """The command line."""

    prompts: list[str]
    file: Path | None
    model: console.ModelOptions
    max_new_tokens: int
    page_size: int
    pool_tokens: int
    while_running: bool
    svg: Path | None
    json: bool

    def config(self, num_prompts: int) -> dict[str, Any]:
        """Fields of EngineConfig."""
        return dict(
            max_sequences=min(max(1, num_prompts), MAX_SEQUENCES),
            page_size=self.page_size,
            pool_tokens=self.pool_tokens,
        )


def parse(argv: list[str]) -> TreeOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv tree", __doc__)
    add = parser.add_argument
    add("prompts", nargs="*", help="prompts; without any, --prompts is read or the demo is held")
    add("--prompts", dest="file", metavar="FILE", type=Path, help="a UTF-8 file, one prompt a line")
    console.add_model_arguments(parser)
    add(
        "--max-new-tokens",
        type=int,
        default=24,
        metavar="N",
        help="tokens of an answer (default: %(default)s)",
    )
    add("--page-size", type=int, default=16, metavar="P", help="tokens per page (default: 16)")
    add(
        "--pool-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens that the cache holds (default: 4096)",
    )
    add("--while-running", action="store_true", help="show the tree before the requests end")
    add("--svg", metavar="FILE", type=Path, help="draw the tree into a file")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.read(TreeOptions, argv)
    if options.prompts and options.file:
        parser.error("give prompts as arguments or with --prompts, not both")
    parser.require_at_least(options, max_new_tokens=1)
    return options


def read_prompts(options: TreeOptions) -> list[str]:
    """The prompts of arguments or file, without blank lines; empty if there is neither."""
    if options.file is None:
        return options.prompts
    return prompt_lines(options.file.read_bytes(), str(options.file))


def converse(llm: LLM, options: TreeOptions) -> None:
    """Holds the demo's conversation; with `--while-running` its last answer is not complete."""
    talk = Conversation(llm.tokenizer).with_system(DEMO_SYSTEM)
    for text in DEMO_TURNS:
        prompt = talk.prompt(text)
        is_last = text is DEMO_TURNS[-1]
        request = llm.request(prompt, max_new_tokens=options.max_new_tokens)
        to_the_end = not (is_last and options.while_running)
        (answer,) = serve(llm.engine, [request], to_the_end=to_the_end)
        talk = talk.answered(text, prompt, answer.tokens, answer.text)


def serve(engine: Engine, requests: list[Request], *, to_the_end: bool) -> list[Completion]:
    """Serves requests together, to their ends or until each has a token.

    Raises:
      RequestError: one of them does not fit.
    """
    running = [engine.submit(request) for request in requests]
    while any(c.finish_reason is None and (to_the_end or not c.tokens) for c in running):
        engine.step()
    return running


def serve_all(llm: LLM, prompts: list[str], options: TreeOptions) -> None:
    """Serves the prompts, or the demo's conversation if there are none."""
    if prompts:
        requests = [llm.request(p, max_new_tokens=options.max_new_tokens) for p in prompts]
        serve(llm.engine, requests, to_the_end=not options.while_running)
    else:
        converse(llm, options)


def show(llm: LLM, options: TreeOptions) -> None:
    """Prints or draws the tree."""
    engine, tokenizer, name = llm.engine, llm.tokenizer, llm.loaded.name
    assert engine.index is not None
    tops = view(engine.index, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    pools = "; ".join(
        f"{p.free} free, {p.cached} cached, {p.held} held" for p in engine.pool_states
    )
    title = f"{name}, pages of {options.page_size} tokens: {pools}"
    if options.svg is not None:
        options.svg.write_text(as_svg(tops, title), encoding="utf-8")
        print(f"{options.svg}: the tree is drawn", file=sys.stderr)
    if options.json:
        record = {
            "model": name,
            "page_size": options.page_size,
            "pools": [pool._asdict() for pool in engine.pool_states],
            "tree": [node.as_json() for node in tops],
        }
        print(json.dumps(record))
    elif options.svg is None:
        print(f"{title}\n{as_text(tops)}")


def main(argv: list[str]) -> int:
    """Serves the prompts and shows the tree."""
    options = parse(argv)
    prompts = read_prompts(options)
    EngineConfig(**options.config(len(prompts)))  # raises before a model is loaded
    if options.svg is not None and not options.svg.parent.is_dir():
        raise UsageError(f"{options.svg.parent}: no such folder")
    console.enable_compilation_cache()
    llm = LLM(console.load_model(options.model), **options.config(len(prompts)))
    serve_all(llm, prompts, options)
    show(llm, options)
    return 0
