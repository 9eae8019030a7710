"""Measure what KV formats cost on a text: perplexity, distance from the full cache, and bytes.

  python scripts bench formats --text novel.txt
  python scripts bench formats --text novel.txt --formats "int8 kivi4 kivi2_r32_s1"
  python scripts bench formats --text novel.txt --model gemma3-270m --formats "kivi4,window=bf16"

One sequence of --tokens tokens, --skip tokens into the text, is computed in chunks through a paged
cache of each format and one of float32. KL is KL(full || format) of the next-token distributions
in nats, and top-1 the share of them with the same likeliest token. The bytes are those of all pages
of a sequence of --at tokens, with parameters, tails and exact tokens, compared with bfloat16.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxkv.cache import CacheSpec, choose_formats
from jaxkv.cli import console
from jaxkv.cli.arguments.serving import read_ranges, read_text
from jaxkv.engine import footprint
from jaxkv.errors import UsageError
from jaxkv.eval import Quality, Setting, measure
from jaxkv.kv_format import PAGE_SIZES, preferred_page_size
from jaxkv.models.decode_model import FlaxDecodeModel

FORMATS = "bf16 int8 fp8_e4m3 fp8_e5m2 int4 kivi4 kivi_k4v2 kivi2 kivi2_r32_s1"


@dataclass(frozen=True, kw_only=True)
class FormatsBenchOptions:
    """The command line."""

    model: console.ModelOptions
    text: Path
    formats: str
    kv_ranges: Path | None
    page_size: int | None
    skip: int
    tokens: int
    chunk: int
    at: int
    json: bool


def parse(argv: list[str]) -> FormatsBenchOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts bench formats", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    add(
        "--formats",
        default=FORMATS,
        metavar="F",
        help="formats, separated by spaces (default: %(default)s)",
    )
    add("--kv-ranges", type=Path, metavar="PATH", help="file of `calibrate`, for static formats")
    add(
        "--page-size",
        type=int,
        metavar="P",
        help="tokens per page (default: 16, with kivi formats 32)",
    )
    add(
        "--skip", type=int, default=2_000, metavar="N", help="tokens to skip (default: %(default)s)"
    )
    add(
        "--tokens",
        type=int,
        default=1_024,
        metavar="N",
        help="tokens scored (default: %(default)s)",
    )
    add(
        "--chunk", type=int, default=256, metavar="T", help="tokens per step (default: %(default)s)"
    )
    add(
        "--at", type=int, default=4_096, metavar="N", help="tokens for bytes (default: %(default)s)"
    )
    add("--json", action="store_true", help="one JSON object per format, one per line")
    options = parser.read(FormatsBenchOptions, argv)
    parser.require_at_least(options, skip=0, tokens=2, chunk=1, at=1)
    if options.page_size is not None and options.page_size not in PAGE_SIZES:
        parser.error(f"--page-size must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    if not options.formats.split():
        parser.error("--formats names no format")
    return options


def main(argv: list[str]) -> int:
    """Measures the formats and prints a table."""
    options = parse(argv)
    text = read_text(options.text)
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    end = options.skip + options.tokens
    tokens = loaded.require_tokenizer().encode(text)[options.skip : end]
    if len(tokens) < options.tokens:
        raise UsageError(f"{options.text}: has fewer than {end} tokens")
    try:
        rows = run(loaded.model, tokens, options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(table(rows))
    return 0


def run(
    model: FlaxDecodeModel, tokens: list[int], options: FormatsBenchOptions
) -> list[dict[str, Any]]:
    """Returns a row per format, the full cache first; formats of one page size share runs.

    Raises:
      ValueError: a format, page size or layer is invalid, or ranges are missing.
    """
    names, ranges = options.formats.split(), read_ranges(options.kv_ranges)
    sizes = {name: options.page_size or preferred_page_size(name) for name in names}
    chosen = {name: choose_formats(name, model.layers, ranges) for name in names}
    settings = {name: Setting(formats=formats) for name, formats in chosen.items()}
    found: dict[str, Quality] = {}
    with console.progress(
        len(tokens) * (len(names) + len(set(sizes.values()))), unit="token", description="measuring"
    ) as bar:
        for size in sorted(set(sizes.values())):
            here = {name: settings[name] for name in names if sizes[name] == size}
            found |= measure(
                model, tokens, here, page_size=size, chunk=options.chunk, on_chunk=bar.update
            )
    rows = []
    for name in ("f32", *[name for name in names if name != "f32"]):
        size = sizes.get(name) or options.page_size or 16
        spec = CacheSpec(
            layers=model.layers,
            page_size=size,
            num_pages=(),
            formats=chosen.get(name) or choose_formats(name, model.layers),
        )
        part = footprint(spec, num_tokens=options.at).ratio
        rows.append(
            {"format": name, "page_size": size, "bytes_of_bf16": round(part, 4)}
            | {"perplexity_ratio": found[name].perplexity / found["f32"].perplexity}
            | asdict(found[name])
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| format | page | perplexity | of full | KL mean | KL p99 | top-1 | bytes of bf16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['page_size']} | {row['perplexity']:.3f} "
            f"| {row['perplexity_ratio']:.4f} | {row['kl_mean']:.4f} | {row['kl_p99']:.3f} "
            f"| {row['top1']:.3f} | {row['bytes_of_bf16']:.4f} |"
        )
    return "\n".join(lines)
