"""Measure what KV formats cost on a text: perplexity, distance from the full cache, and bytes.

  python scripts bench formats --text novel.txt
  python scripts bench formats --text novel.txt --formats "int8 kivi4 kivi2_r32_s1"
  python scripts bench formats --text novel.txt --model gemma3-270m --formats "kivi4,window=bf16"

One sequence of --tokens tokens, --skip tokens into the text, is computed in chunks through a paged
cache of each format beside one of float32. KL is KL(full || format) of the next-token distributions
in nats, top-1 the share of them with the same likeliest token; bytes are of all pages that the
sequence holds when it has --at tokens, parameters, tails and exact tokens included, against
bfloat16.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxkv.cache import CacheSpec, choose_formats
from jaxkv.cli import console
from jaxkv.cli.arguments.serving import kv_ranges, read_text
from jaxkv.engine import RequestError, footprint
from jaxkv.eval import Quality, Setting, measure
from jaxkv.kv_format import PAGE_SIZES, preferred_page_size
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.errors import ModelError

FORMATS = "bf16 int8 fp8_e4m3 fp8_e5m2 int4 kivi4 kivi_k4v2 kivi2 kivi2_r32_s1"


def main(argv: list[str]) -> int:
    """Measures the formats and prints a table."""
    parser = console.Parser("python scripts bench formats", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    add(
        "--formats", default=FORMATS, metavar="F", help="spaces between them (default: %(default)s)"
    )
    add("--kv-ranges", type=Path, metavar="PATH", help="of `calibrate`, for static formats")
    add("--page-size", type=int, metavar="P", help="(default: 16, with kivi formats 32)")
    add("--skip", type=int, default=2_000, metavar="N", help="(default: %(default)s)")
    add("--tokens", type=int, default=1_024, metavar="N", help="(default: %(default)s)")
    add("--chunk", type=int, default=256, metavar="T", help="(default: %(default)s)")
    add("--at", type=int, default=4_096, metavar="N", help="(default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a format, a line each")
    args = parser.parse_args(argv)
    for name, least in (("skip", 0), ("tokens", 2), ("chunk", 1), ("at", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if args.page_size is not None and args.page_size not in PAGE_SIZES:
        parser.error(f"--page-size must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    if not args.formats.split():
        parser.error("--formats has none")
    text = read_text(args.text)
    console.enable_compilation_cache()
    loaded = console.load_model(args)
    tokens = loaded.require_tokenizer().encode(text)[args.skip : args.skip + args.tokens]
    if len(tokens) < args.tokens:
        raise ModelError(f"{args.text}: has fewer than {args.skip + args.tokens} tokens")
    try:
        rows = run(loaded.model, tokens, args)
    except ValueError as error:
        raise RequestError(str(error)) from None
    for row in rows if args.json else ():
        print(json.dumps(row))
    if not args.json:
        print(table(rows))
    return 0


def run(
    model: FlaxDecodeModel, tokens: list[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each format, the full cache first; formats of one page size share its runs.

    Raises:
      ValueError: a format, page size or layer that is none, or ranges that are missing.
    """
    names, ranges = args.formats.split(), kv_ranges(args)
    sizes = {name: args.page_size or preferred_page_size(name) for name in names}
    chosen = {name: choose_formats(name, model.layers, ranges) for name in names}
    settings = {name: Setting(formats=formats) for name, formats in chosen.items()}
    found: dict[str, Quality] = {}
    with console.progress(
        len(tokens) * (len(names) + len(set(sizes.values()))), unit="token", description="measuring"
    ) as bar:
        for size in sorted(set(sizes.values())):
            here = {name: settings[name] for name in names if sizes[name] == size}
            found |= measure(
                model, tokens, here, page_size=size, chunk=args.chunk, on_chunk=bar.update
            )
    rows = []
    for name in ("f32", *[name for name in names if name != "f32"]):
        size = sizes.get(name) or args.page_size or 16
        spec = CacheSpec(
            layers=model.layers,
            page_size=size,
            num_pages=(),
            formats=chosen.get(name) or choose_formats(name, model.layers),
        )
        part = footprint(spec, num_tokens=args.at).ratio
        rows.append(
            {"format": name, "page_size": size, "bytes_of_bf16": round(part, 4)}
            | {"perplexity_ratio": found[name].perplexity / found["f32"].perplexity}
            | asdict(found[name])
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them."""
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
