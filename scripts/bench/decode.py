"""Time prefill and decode of a model, including the host side, next to the peers installed here.

  python scripts bench decode
  python scripts bench decode --json --rounds 5
  python scripts bench decode --only decode --plot decode.svg

Every system runs each workload in turn, round after round, on the same weights in float32; the
table shows medians in tokens per second. Peers are llama.cpp (`pip install llama-cpp-python`) and
transformers with torch, if they can be imported.
"""

import json
import os
import resource
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.cli import console
from jaxkv.cli.output import plots, tables
from jaxkv.errors import UsageError
from jaxkv.models.loading import LoadedModel
from scripts.bench.peers import Jaxkv, System, installed_peers, write_float32_gguf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 1 << 20

Medians = dict[str, dict[str, float]]  # tokens per second, by system and workload


@dataclass(frozen=True)
class Workload:
    """What is timed: a prompt of `context` tokens, or decode steps of `batch` such sequences.

    Attributes:
      name: title of its column in the table.
      batch: number of sequences that decode; if 0, the prompt is timed.
      context: tokens of each prompt.
    """

    name: str
    batch: int
    context: int

    def tokens_per_second(self, system: System, num_steps: int, seed: int) -> float:
        """Runs once; decode uses the median step."""
        rng = np.random.default_rng(seed)
        prompts = rng.integers(100, 20_000, (max(self.batch, 1), self.context)).tolist()
        if self.batch == 0:
            return self.context / system.prefill(prompts[0])
        return self.batch / statistics.median(system.decode(prompts, num_steps))


WORKLOADS = (
    Workload("decode b1 ctx 128", 1, 128),
    Workload("decode b1 ctx 1024", 1, 1024),
    Workload("decode b8 ctx 128", 8, 128),
    Workload("decode b32 ctx 128", 32, 128),
    Workload("prefill 512", 0, 512),
    Workload("prefill 1500", 0, 1500),
)


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions:
    """The command line."""

    model: console.ModelOptions
    rounds: int
    steps: int
    no_peers: bool
    only: str
    json: bool
    plot: Path | None

    @property
    def workloads(self) -> list[Workload]:
        """The workloads that --only selects."""
        return [workload for workload in WORKLOADS if self.only in workload.name]


def parse(argv: list[str]) -> DecodeBenchOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts bench decode", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="timed rounds (default: %(default)s)")
    add("--steps", type=int, default=24, metavar="N", help="decode steps per round (default: 24)")
    add("--no-peers", action="store_true", help="time jaxkv only")
    add("--only", metavar="TEXT", default="", help="run only workloads whose name has this text")
    add("--json", action="store_true", help="one JSON object on standard output")
    add("--plot", type=Path, metavar="FILE", help="draw the medians into a .png or .svg")
    options = parser.read(DecodeBenchOptions, argv)
    if not options.workloads:
        names = [workload.name for workload in WORKLOADS]
        raise UsageError(f"--only {options.only!r}: the workloads are {names}")
    parser.require_at_least(options, rounds=1, steps=1)
    tables.check_file(parser, options.plot, "--plot", (".png", ".svg"))
    if options.plot is not None:
        plots.require()
    return options


def main(argv: list[str]) -> int:
    """Runs the bench and prints its table."""
    options = parse(argv)
    console.enable_compilation_cache()
    medians, own_peak = measure(console.load_model(options.model), options)
    if options.json:
        print(json.dumps({"tokens_per_second": medians, "peak_rss_mib": own_peak}))
    else:
        print(_table(medians, own_peak))
    if options.plot is not None:
        plots.save(drawn(medians), options.plot)
    return 0


def measure(loaded: LoadedModel, options: DecodeBenchOptions) -> tuple[Medians, dict[str, int]]:
    """Returns median tokens per second by system and workload, and jaxkv's peak RSS in MiB."""
    workloads = options.workloads
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        systems: list[System] = [Jaxkv(loaded.model)]
        own_peak = _warm_up(systems, workloads)
        if not options.no_peers and loaded.source.suffix == ".gguf":
            peer_file = Path(folder) / "float32.gguf"
            write_float32_gguf(loaded.source, peer_file)
            peers = installed_peers(peer_file, os.cpu_count() or 1)
            _warm_up(peers, workloads)
            systems += peers
        total = options.rounds * len(workloads) * len(systems)
        with console.progress(total, unit="run", description="timing") as bar:
            for seed in range(options.rounds):
                for workload in workloads:
                    for system in systems:
                        rate = workload.tokens_per_second(system, options.steps, seed)
                        rates.setdefault(system.name, {}).setdefault(workload.name, []).append(rate)
                        bar.update()
    medians = {
        system: {name: statistics.median(values) for name, values in row.items()}
        for system, row in rates.items()
    }
    return medians, own_peak


def drawn(medians: Medians) -> "Figure":
    """Draws milliseconds per token of each system, for the decode workloads."""
    names = [name for name in medians[Jaxkv.name] if name.startswith("decode")]
    figure, axes = plots.new_figure(0.9 + 0.25 * len(names) * (1 + len(medians)))
    height = 0.8 / len(medians)
    for i, (system, row) in enumerate(medians.items()):
        places = [place + (i + 0.5) * height - 0.4 for place in range(len(names))]
        costs = [1e3 / row[name] for name in names]
        bars = axes.barh(places, costs, height, color=plots.COLOURS[i], label=system)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds per generated token, float32; less is better")
    axes.legend(fontsize=8)
    return figure


def _warm_up(systems: list[System], workloads: list[Workload]) -> dict[str, int]:
    """Runs each workload once, so that all is compiled; returns the peak RSS after each, MiB."""
    peaks = {}
    for workload in workloads:
        for system in systems:
            workload.tokens_per_second(system, 2, seed=0)
        peaks[workload.name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MIB
    return peaks


def _table(medians: Medians, own_peak: dict[str, int]) -> str:
    """Returns the medians as Markdown, with the ratio to each peer."""
    names = list(medians[Jaxkv.name])
    lines = ["| tokens/s | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for system, row in medians.items():
        lines.append(f"| {system} | " + " | ".join(f"{row[name]:.1f}" for name in names) + " |")
    for system in list(medians)[1:]:
        ratios = (medians[Jaxkv.name][name] / medians[system][name] for name in names)
        lines.append(f"| jaxkv / {system} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
    lines.append("| jaxkv peak RSS so far, MiB | " + " | ".join(map(str, own_peak.values())) + " |")
    return "\n".join(lines)
