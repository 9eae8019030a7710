"""Gives a model fewer KV heads, and trains it further.

    python scripts uptrain --model smollm2-135m --kv-heads 1 --text novels/*.txt --steps 2000 \\
        --fraction 0.05 --out smollm2-mqa
    python scripts decode --model smollm2-mqa "Once upon a time"

Heads are pooled (--init), and the model is trained on the text for --fraction of --steps updates.
The loss is that of the next token; for the part --distil of it, the distance from the original's
distribution. The last tenth of the text is held out: its loss is printed before and after.

The state of the run, its losses (loss.csv) and their curve are in OUT.training. A run that was
stopped continues from there with the same command, to the same bits. A command with another model,
text or options is refused, and so is a new one after OUT is complete.
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import read_text
from jaxkv.cli.output.line_plots import save_lines
from jaxkv.models.errors import ModelError
from jaxkv.models.kv_heads import POOLINGS, Pooling, with_kv_heads
from jaxkv.models.loading import LoadedModel
from jaxkv.models.orbax_checkpoint import check_target, save_checkpoint
from jaxkv.models.training import TrainConfig, Trainer, mean_loss
from jaxkv.models.whole_files import write_whole
from scripts.studies import folder as studies

SAVE_EVERY = 50  # updates


@dataclass(frozen=True, kw_only=True)
class UptrainOptions:
    """The command line."""

    model: console.ModelOptions
    kv_heads: int
    init: Pooling
    text: list[Path]
    out: Path
    steps: int
    fraction: float
    batch: int
    length: int
    lr: float
    distil: float
    seed: int


def parse(argv: list[str]) -> UptrainOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts uptrain", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--kv-heads", type=int, required=True, metavar="K", help="KV heads of the new model")
    add("--init", choices=POOLINGS, default="mean", help="how heads are pooled (default: mean)")
    add("--text", type=Path, nargs="+", required=True, metavar="PATH", help="UTF-8 texts")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory: the new model")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--steps", type=int, default=1000, metavar="N", help="updates of a full training")
    add("--fraction", type=float, default=1.0, metavar="X", help="part of them to run (default: 1)")
    add("--batch", type=int, default=8, metavar="B", help="sequences per update (default: 8)")
    add("--length", type=int, default=256, metavar="S", help="tokens per sequence (default: 256)")
    add("--lr", type=float, default=3e-4, metavar="X", help="learning rate (default: 3e-4)")
    add("--distil", type=float, default=0.0, metavar="X", help="part of distillation (default: 0)")
    add("--seed", type=int, default=0, help="for batches and --init random (default: 0)")
    options = parser.read(UptrainOptions, argv)
    parser.require_at_least(options, kv_heads=1, steps=1, batch=1, length=2, seed=0)
    if not 0 <= options.fraction <= 1 or not 0 <= options.distil <= 1:
        parser.error("--fraction and --distil must be 0 to 1")
    if not 0 < options.lr <= float(np.finfo(np.float32).max):
        parser.error("--lr must be above 0, and a finite float32")
    return options


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parse(argv)
    check_target(options.out)
    texts = [read_text(path) for path in options.text]
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    tokens = np.array(loaded.require_tokenizer().encode("\n".join(texts)), np.int32)
    config = TrainConfig(
        num_steps=max(1, round(options.steps * options.fraction)),
        batch=options.batch,
        length=options.length,
        learning_rate=options.lr,
        distil=options.distil,
        seed=options.seed,
    )
    cut = len(tokens) - max(len(tokens) // 10, options.length + 1)
    if cut <= options.length:
        raise ModelError(f"{len(tokens)} tokens of text are too few for --length {options.length}")
    start = with_kv_heads(loaded.model, options.kv_heads, options.init, seed=options.seed)
    teacher = loaded.model if options.distil else None
    trainer = Trainer(start, tokens[:cut], config, teacher=teacher)
    if options.fraction > 0:
        folder = options.out.with_name(options.out.name + ".training")
        run = asdict(config) | {"kv_heads": options.kv_heads, "init": options.init}
        run |= asdict(options.model)
        run |= {"weights_sha256": studies.model_sum(loaded.model)}
        run |= {"text_sha256": studies.text_sum(tokens)}
        studies.claim(folder, run, "state/*")
        train(trainer, folder)
    sizes = dict(batch=options.batch, length=options.length)
    original, before, after = (
        mean_loss(model, tokens[cut:], **sizes) for model in (loaded.model, start, trainer.model)
    )
    if not math.isfinite(after):
        raise ModelError(f"the trained model's loss is {after}; a lower --lr may help")
    save_checkpoint(options.out, replace(loaded, model=trainer.model))
    report(loaded, options, trainer.step)
    print(f"held-out loss, nats per token: original {original:.4f}, pooled {before:.4f}, ", end="")
    print(f"trained {after:.4f}")
    return 0


def train(trainer: Trainer, folder: Path) -> None:
    """Runs the training, from the state in a folder if there is one."""
    state, curve = folder / "state", folder / "loss.csv"
    losses = read_losses(curve, trainer.step) if trainer.restore(state) else []
    num_steps = trainer.config.num_steps
    with console.progress(num_steps, unit="step", description="training") as bar:
        bar.update(trainer.step)

        def on_step(step: int, loss: float) -> None:
            losses.append((step, loss))
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

        while trainer.step < num_steps:
            trainer.run(trainer.step + SAVE_EVERY, on_step)
            write_losses(curve, losses)  # before the state, so that a state always has its losses
            trainer.save(state)
    points = [(float(step), loss, 0.0) for step, loss in losses]
    name = folder.name.removesuffix(".training")
    save_lines(folder / "loss", {"training": points}, labels=("step", "nats per token"), title=name)


def read_losses(path: Path, num_steps: int) -> list[tuple[int, float]]:
    """Reads the first losses that `write_losses` wrote.

    Raises:
      ModelError: some are missing.
    """
    try:
        rows = csv.DictReader(path.read_text("utf-8").splitlines())
        found = [(int(row["step"]), float(row["loss"])) for row in islice(rows, num_steps)]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        found = []
    if [step for step, _ in found] != list(range(1, num_steps + 1)):
        raise ModelError(
            f"{path}: lacks losses of the {num_steps} steps that are done; remove the folder, and "
            "the training starts again"
        )
    return found


def write_losses(path: Path, losses: Iterable[tuple[int, float]]) -> None:
    """Writes the losses of all steps."""
    write_whole(path, "step,loss\n" + "".join(f"{n},{loss!r}\n" for n, loss in losses))


def report(loaded: LoadedModel, options: UptrainOptions, steps: int) -> None:
    """Prints a summary of the new model."""
    K = loaded.model.config.attention.num_kv_heads
    heads = f"{options.kv_heads} of {K} KV heads ({options.init})"
    print(f"{options.out}: {heads}, {steps} steps, {options.kv_heads / K:.3f} of the cache's bytes")
