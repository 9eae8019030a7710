"""Show the radix tree that a prefix index makes of prompts.

  jaxkv tree                            # of a conversation of five turns
  jaxkv tree "The sea is blue." "The sea is deep."
  jaxkv tree --prompts questions.txt --while-running --svg tree.svg

Prompts are arguments or lines of a file, as they are, without a chat template, and are served
together; the conversation is the one of `chat --demo`. A node is a run of tokens that all below it
begin with. With it stand its positions, its pages in the pool, how many sequences hold them, how
often it was matched or inserted, and how long ago; `*` marks what several sequences begin with.

The tree is shown when all requests have ended, with their answers in it and nobody holding a page;
`--while-running` shows it when all prompts are computed and still held.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import make_engine, prompt_lines
from jaxkv.cli.conversation import DEMO_SYSTEM, DEMO_TURNS, Conversation
from jaxkv.cli.output.tree_view import as_svg, as_text, view
from jaxkv.engine import Completion, Engine, EngineConfig, Request
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel
from jaxkv.models.tokenizer import Tokenizer

MAX_SEQUENCES = 16  # served at once


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the arguments."""
    parser = console.Parser("jaxkv tree", __doc__)
    add = parser.add_argument
    add("prompts", nargs="*", help="prompts; none: read --prompts, or hold the conversation")
    add("--prompts", dest="file", metavar="FILE", type=Path, help="a prompt a line, UTF-8")
    console.add_model_arguments(parser)
    add("--max-new-tokens", type=int, default=24, metavar="N", help="(default: %(default)s)")
    add("--page-size", type=int, default=16, metavar="P", help="tokens a page (default: 16)")
    add("--pool-tokens", type=int, default=4096, metavar="N", help="the cache (default: 4096)")
    add("--while-running", action="store_true", help="show it before the last requests end")
    add("--svg", metavar="FILE", type=Path, help="draw it into a file")
    add("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)
    if args.prompts and args.file:
        parser.error("give prompts as arguments or with --prompts, not both")
    if args.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of arguments or file, without blank lines; empty where there is neither."""
    if args.file is None:
        return args.prompts
    return prompt_lines(args.file.read_bytes(), str(args.file))


def converse(engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Holds the demo's conversation; its last answer is under way with `--while-running`."""
    talk = Conversation(tokenizer, DEMO_SYSTEM)
    for text in DEMO_TURNS:
        prompt = talk.prompt(text)
        is_last = text is DEMO_TURNS[-1]
        request = Request(
            prompt=tuple(prompt),
            max_new_tokens=args.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        completion = serve(engine, [request], to_the_end=not (is_last and args.while_running))[0]
        talk.add(text, prompt, completion)


def serve(engine: Engine, requests: list[Request], *, to_the_end: bool) -> list[Completion]:
    """Serves requests together, to their ends or until each has a token.

    Raises:
      RequestError: one of them does not fit.
    """
    running = [engine.submit(request) for request in requests]
    while any(c.finish_reason is None and (to_the_end or not c.tokens) for c in running):
        engine.step()
    return running


def build(loaded: LoadedModel, prompts: list[str], args: argparse.Namespace) -> Engine:
    """An engine that has served the prompts, or the demo's conversation where there are none."""
    tokenizer = loaded.require_tokenizer()
    config = EngineConfig(
        max_sequences=min(max(1, len(prompts)), MAX_SEQUENCES),
        page_size=args.page_size,
        pool_tokens=args.pool_tokens,
    )
    engine = make_engine(loaded, config)
    requests = [
        Request(
            prompt=tuple(tokenizer.encode(prompt)),
            max_new_tokens=args.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        for prompt in prompts
    ]
    if requests:
        serve(engine, requests, to_the_end=not args.while_running)
    else:
        converse(engine, tokenizer, args)
    return engine


def main(argv: list[str]) -> int:
    """Serves what is asked for, and shows the tree."""
    args = parse(argv)
    prompts = read_prompts(args)
    EngineConfig(page_size=args.page_size, pool_tokens=args.pool_tokens)  # raises for bad values
    if args.svg is not None and not args.svg.parent.is_dir():
        raise ModelError(f"{args.svg.parent}: no such folder")
    console.enable_compilation_cache()
    loaded = console.load_model(args)
    tokenizer = loaded.require_tokenizer()
    engine = build(loaded, prompts, args)
    assert engine.index is not None
    tops = view(engine.index, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    pools = "; ".join(
        f"{p.free} free, {p.cached} cached, {p.held} held" for p in engine.pool_states
    )
    title = f"{loaded.name}, pages of {args.page_size} tokens: {pools}"
    if args.svg is not None:
        args.svg.write_text(as_svg(tops, title), encoding="utf-8")
        print(f"{args.svg}: the tree is drawn", file=sys.stderr)
    if args.json:
        record = {
            "model": loaded.name,
            "page_size": args.page_size,
            "pools": [pool._asdict() for pool in engine.pool_states],
            "tree": [node.as_json() for node in tops],
        }
        print(json.dumps(record))
    elif args.svg is None:
        print(f"{title}\n{as_text(tops)}")
    return 0
