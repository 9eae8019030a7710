"""Measures on a small model how much quality fewer KV heads cost, as in the GQA paper.

    python scripts heads --text novels/*.txt --out heads
    python scripts heads --text novels/*.txt --out heads-gpu --size gpu      # on an accelerator

A Llama-shaped decoder over bytes, with as many KV heads as query heads, is trained from scratch.
Its heads are then pooled into fewer, in each way, and each new model is trained further at a
constant rate. Its loss on held-out text is measured after shares of the first training's steps.
For comparison the first model is trained for as long again. Everything is repeated for each seed.

Each row is written to rows.jsonl when it is measured. The same command continues a run that was
stopped, and a command with more seeds or ways extends the study. Another text or size in the same
--out is refused. At the end rows.csv has the rows that were asked for, summary.json their means and
standard deviations over seeds, and loss.png and .svg the curves (with the extra `plot`).
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import jax
import numpy as np

from jaxkv.cli import console
from jaxkv.cli.output.line_plots import save_lines
from jaxkv.models.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.errors import ModelError
from jaxkv.models.kv_heads import POOLINGS, Pooling, with_kv_heads
from jaxkv.models.training import TrainConfig, Trainer, mean_loss
from jaxkv.models.weights import random_model
from jaxkv.models.whole_files import write_whole
from scripts.studies import folder as studies

SHARES = (0.0, 0.01, 0.02, 0.05, 0.10)
NATS_TO_BITS = 1 / np.log(2)
NOT_POOLED = "none"

Row = dict[str, Any]
Cell = tuple[int, int, str]  # seed, K, way of pooling


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a study.

    Attributes:
      layers, width, heads: sizes of the model; K = H, and F is 8/3 of the width.
      steps, batch, length: updates, sequences per update and tokens per sequence.
      lr: learning rate.
      held_out: bytes of text on which losses are measured.
    """

    layers: int
    width: int
    heads: int
    steps: int
    batch: int
    length: int
    lr: float = 3e-3
    held_out: int = 65_536

    def model(self) -> ModelConfig:
        """The configuration of the decoder over bytes."""
        D = self.width // self.heads
        layer = LayerConfig(window=None, rope=RopeConfig(theta=10_000.0))
        return ModelConfig(
            family="llama",
            vocab_size=256,
            width=self.width,
            mlp_width=8 * self.width // 3 // 8 * 8,
            layers=(layer,) * self.layers,
            attention=AttentionConfig(
                num_heads=self.heads, num_kv_heads=self.heads, head_dim=D, scale=D**-0.5
            ),
            max_positions=max(1024, self.length),
            rms_eps=1e-5,
        )


SIZES = {
    "ci": Size(layers=2, width=32, heads=4, steps=20, batch=4, length=32, held_out=2_048),
    "cpu": Size(layers=3, width=96, heads=8, steps=600, batch=8, length=128),
    "gpu": Size(layers=8, width=512, heads=8, steps=20_000, batch=64, length=512, lr=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """The command line."""

    text: list[Path]
    out: Path
    size: str
    seeds: int
    init: list[Pooling]


def parse(argv: list[str]) -> HeadsOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts heads", __doc__)
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="texts; any bytes are valid",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="a folder for the results")
    add("--size", choices=SIZES, default="cpu", help="size (default: cpu, ten minutes on 2 cores)")
    add("--seeds", type=int, default=3, metavar="N", help="repetitions (default: 3)")
    add(
        "--init",
        nargs="+",
        choices=POOLINGS,
        default=POOLINGS,
        help="ways of pooling (default: all)",
    )
    options = parser.read(HeadsOptions, argv)
    parser.require_at_least(options, seeds=1)
    return replace(options, init=list(dict.fromkeys(options.init)))


def main(argv: list[str]) -> int:
    """Runs the study; returns its exit code."""
    options = parse(argv)
    size = SIZES[options.size]
    data = np.frombuffer(b"\n".join(path.read_bytes() for path in options.text), np.uint8)
    data = data.astype(np.int32)
    if len(data) < 2 * size.held_out:
        raise ModelError(f"{len(data)} bytes of text; {2 * size.held_out} at least are needed")
    console.enable_compilation_cache()
    run = asdict(size) | {"text_sha256": studies.text_sum(data)}
    studies.claim(options.out, run, "rows.jsonl", "base-*")
    file = options.out / "rows.jsonl"
    done = read_rows(file)
    pooled = product(fewer(size.heads), options.init)
    cells: list[tuple[int, Pooling | None]] = [(size.heads, None), *pooled]
    last = round(SHARES[-1] * size.steps)
    steps = options.seeds * (size.steps + len(cells) * last)
    rows: list[Row] = []
    with console.progress(steps, unit="step", description="heads") as bar:
        for seed in range(options.seeds):
            base = trained_base(size, data[: -size.held_out], seed, options.out, bar)
            for K, init in cells:
                cell = seed, K, init or NOT_POOLED
                if cell in done:
                    bar.update(last)
                else:
                    new = base if init is None else with_kv_heads(base, K, init, seed=seed)
                    done[cell] = list(curve(new, size, data, seed, init or NOT_POOLED, bar))
                    lines = (json.dumps(row) + "\n" for found in done.values() for row in found)
                    write_whole(file, "".join(lines))
                rows += done[cell]
    write_results(options, rows, size)
    return 0


def fewer(heads: int) -> list[int]:
    """Numbers of KV heads to try: half of them, a quarter, .. 1."""
    return [heads >> i for i in range(1, heads.bit_length())]


def trained_base(size: Size, data: np.ndarray, seed: int, out: Path, bar: Any) -> FlaxDecodeModel:
    """Trains the decoder of a seed from scratch, or from its last state if there is one."""
    config = TrainConfig(
        num_steps=size.steps,
        batch=size.batch,
        length=size.length,
        learning_rate=size.lr,
        warmup=size.steps // 20,
        seed=seed,
    )
    trainer = Trainer(random_model(size.model(), seed), data, config)
    trainer.restore(out / f"base-{seed}")
    bar.update(trainer.step)
    while trainer.step < size.steps:
        trainer.run(trainer.step + max(1, size.steps // 4), lambda step, loss: bar.update())
        trainer.save(out / f"base-{seed}")
    return trainer.model


def curve(
    model: FlaxDecodeModel, size: Size, data: np.ndarray, seed: int, init: str, bar: Any
) -> Iterator[Row]:
    """Returns a row for each share of the training."""
    last = round(SHARES[-1] * size.steps)
    config = TrainConfig(
        num_steps=last,
        batch=size.batch,
        length=size.length,
        learning_rate=size.lr / 3,
        warmup=0,
        decay=1.0,
        seed=1000 + seed,
    )
    trainer = Trainer(model, data[: -size.held_out], config)
    for share in SHARES:
        trainer.run(round(share * size.steps), lambda step, loss: bar.update())
        loss = mean_loss(trainer.model, data[-size.held_out :], length=size.length)
        yield {
            "seed": seed,
            "kv_heads": model.config.attention.num_kv_heads,
            "init": init,
            "share": share,
            "bits_per_byte": loss * NATS_TO_BITS,
        }


def read_rows(path: Path) -> dict[Cell, list[Row]]:
    """Reads the rows of complete cells; an incomplete last line is left out.

    Raises:
      ModelError: a line is not a row.
    """
    cells: dict[Cell, list[Row]] = {}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            cell, share = (row["seed"], row["kv_heads"], row["init"]), row["share"]
            sound = share in SHARES and math.isfinite(row["bits_per_byte"]) and len(row) == 5
            cells.setdefault(cell, []).append(row)
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise ModelError(f"{path}: line {number} is not a row; remove it, or the folder")
    return {
        cell: rows for cell, rows in cells.items() if [row["share"] for row in rows] == [*SHARES]
    }


def summary(rows: list[Row]) -> list[Row]:
    """Returns mean and standard deviation over seeds, and the recovered part of pooling's loss.

    The reference is the model with all heads after as much further training.
    """
    cells: dict[tuple[int, str, float], list[float]] = {}
    for row in rows:
        cell = row["kv_heads"], row["init"], row["share"]
        cells.setdefault(cell, []).append(row["bits_per_byte"])
    whole = {share: mean(x) for (_, init, share), x in cells.items() if init == NOT_POOLED}
    found = []
    for (K, init, share), x in cells.items():
        lost = mean(cells[K, init, 0.0]) - whole[0.0]
        left = mean(x) - whole[share]
        found.append(
            {
                "kv_heads": K,
                "init": init,
                "share": share,
                "bits_per_byte": mean(x),
                "std": stdev(x) if len(x) > 1 else 0.0,
                "seeds": len(x),
                "recovered": 1 - left / lost if lost > 0 else 1.0,
            }
        )
    return found


def write_results(options: HeadsOptions, rows: list[Row], size: Size) -> None:
    """Writes tables and curves."""
    with (options.out / "rows.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = summary(rows)
    (options.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    whole = {row["share"]: row["bits_per_byte"] for row in found if row["init"] == NOT_POOLED}
    lines = {}
    for K in fewer(size.heads):
        for init in options.init:
            cell = [row for row in found if (row["kv_heads"], row["init"]) == (K, init)]
            lines[f"{K} KV heads, {init}"] = [
                (100 * row["share"], row["bits_per_byte"], row["std"]) for row in cell
            ]
    save_lines(
        options.out / "loss",
        lines,
        labels=("share of the training, %", "bits per byte"),
        title=f"{size.heads} query heads, {options.seeds} seeds ({jax.default_backend()})",
        levels={f"{size.heads} KV heads, trained further": whole[SHARES[-1]]},
    )
    print("| KV heads | pooled by | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    print("|---|---|" + "---|" * len(SHARES))
    for K in (size.heads, *fewer(size.heads)):
        for init in (NOT_POOLED, *options.init):
            cell = [row for row in found if (row["kv_heads"], row["init"]) == (K, init)]
            if cell:
                values = [f"{row['bits_per_byte']:.3f} ± {row['std']:.3f}" for row in cell]
                print(f"| {K} | {init} | " + " | ".join(values) + " |")
