"""Count the multiply-adds of generating tokens with a KV cache and without.

  jaxkv simulate macs                                    # Llama 2 7B, 1 to 1,024 tokens
  jaxkv simulate macs --model llama-3.1-8b --prompt 512 --tokens 64,256,1k
  jaxkv simulate macs --config path/config.json --tokens 32k --no-loops --plot macs.svg

Without a cache, a step computes all tokens before the one that it draws; with a cache, it computes
one. The counts are closed forms. Up to --loops tokens they are also counted by running the loops
over steps, tokens and layers; both counts must be exactly equal. `linear` are projections and MLPs,
`attention` scores and values; a multiply-add is two operations.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.ledger import (
    LedgerModelOptions,
    add_model_arguments,
    argument,
    listed,
)
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, OutputOptions, decimals, percent, whole
from jaxkv.ledger import Model, decode_macs, generation_macs, parse_tokens, prefill_macs, simulate

DEFAULT = "llama-2-7b"
LOOPED = 256  # tokens in the end up to which loops are run
MOST_LOOPED, MOST = 2_048, 1 << 30


@dataclass(frozen=True, kw_only=True)
class MacsOptions:
    """The command line."""

    chosen: LedgerModelOptions
    prompt: int
    tokens: list[int]
    loops: int
    no_loops: bool
    output: OutputOptions
    plot: Path | None


def parse(argv: list[str]) -> MacsOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv simulate macs", __doc__)
    add_model_arguments(parser, DEFAULT, several=False)
    add = parser.add_argument
    add("--prompt", type=argument(parse_tokens), default=1, metavar="N",
        help="tokens of the prompt (default: 1)")  # fmt: skip
    default = [1 << n for n in range(0, 11)]
    add("--tokens", type=listed(parse_tokens), default=default, metavar="N,..",
        help="tokens that are generated (default: 1,2,4,..,1k)")  # fmt: skip
    add("--loops", type=argument(parse_tokens), default=LOOPED, metavar="N",
        help="also run the loops, up to this many tokens (default: %(default)s)")  # fmt: skip
    add("--no-loops", action="store_true", help="closed forms only")
    tables.add_output_arguments(parser, plot="multiply-adds against the length")
    options = parser.read(MacsOptions, argv)
    tables.check_file(parser, options.plot, "--plot", (".png", ".svg"))
    if options.prompt + max(options.tokens) > MOST:
        parser.error(f"--prompt and --tokens: at most {MOST} together")
    if options.loops > MOST_LOOPED:
        parser.error(f"--loops: at most {MOST_LOOPED}, which takes minutes")
    return options


def main(argv: list[str]) -> int:
    """Prints a row for each number of tokens."""
    options = parse(argv)
    model = options.chosen.one(DEFAULT)
    if options.plot is not None:
        from jaxkv.cli.output import plots

        plots.save(plots.multiply_adds(model, plots.CONTEXTS), options.plot)
    prompt, most = options.prompt, 0 if options.no_loops else options.loops
    rows = []
    with console.progress(len(options.tokens), unit="row", description="counting") as bar:
        for new in options.tokens:
            rows.append(row_of(model, prompt, new, loops=prompt + new <= most))
            bar.update()
    tables.write(rows, COLUMNS, options.output, model.notes)
    return 0


def row_of(model: Model, prompt: int, new: int, *, loops: bool) -> dict[str, Any]:
    """The counts of generating `new` tokens after a prompt."""
    with_cache, without = (
        generation_macs(model, prompt, new, cache=cache) for cache in (True, False)
    )
    row = {"model": model.name, "prompt": prompt, "tokens": new}
    for name, macs in (("with_cache", with_cache), ("without", without)):
        row[f"{name}_linear"] = macs.linear
        row[f"{name}_attention"] = macs.attention
        row[f"{name}_macs"] = macs.total
    last = prompt + new - 1
    counted = loops and all(
        simulate(model, prompt, new, cache=cache) == macs
        for cache, macs in ((True, with_cache), (False, without))
    )
    if loops and not counted:
        raise AssertionError(f"{model.name}: the loops count otherwise at {prompt} + {new} tokens")
    return row | {
        "saved_ratio": without.total / with_cache.total,
        "last_step_with_cache": decode_macs(model, last).total if new > 1 else with_cache.total,
        "last_step_without": prefill_macs(model, last).total,
        "attention_share": without.attention_share,
        "loops": "equal" if counted else "not run",
    }


COLUMNS = (
    Column("tokens", "tokens", whole),
    Column("with_cache_macs", "with cache", whole),
    Column("without_macs", "without", whole),
    Column("saved_ratio", "without / with", decimals(1)),
    Column("last_step_with_cache", "last step with", whole),
    Column("last_step_without", "last step without", whole),
    Column("attention_share", "attention's share without", percent),
    Column("loops", "loops"),
)
