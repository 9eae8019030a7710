"""Time prefill and decode of a model, host side included, beside the peers installed here.

  python scripts bench decode
  python scripts bench decode --json --rounds 5

Every system runs each workload in turn, round after round, on the same weights in float32; the
table shows medians in tokens a second. Peers are llama.cpp (`pip install llama-cpp-python`) and
transformers with torch, where they can be imported.
"""

import json
import os
import resource
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxkv.cli import console
from jaxkv.models.errors import ModelError
from scripts.bench.peers import Ours, System, installed_peers, write_float32_gguf

MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """What is timed: a prompt of `context` tokens, or decode steps of `batch` such sequences.

    Attributes:
      name: column of the table.
      batch: sequences that decode; 0 times the prompt itself.
      context: tokens of each prompt.
    """

    name: str
    batch: int
    context: int

    def tokens_per_second(self, system: System, num_steps: int, seed: int) -> float:
        """Runs once; decode takes the median step."""
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


def main(argv: list[str]) -> int:
    """Runs the bench and prints its table."""
    parser = console.Parser("python scripts bench decode", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="timed rounds (default: %(default)s)")
    add("--steps", type=int, default=24, metavar="N", help="decode steps a round (default: 24)")
    add("--no-peers", action="store_true", help="jaxkv alone")
    add("--only", metavar="TEXT", default="", help="workloads whose name has this text")
    add("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)
    workloads = [workload for workload in WORKLOADS if args.only in workload.name]
    if not workloads:
        raise ModelError(f"--only {args.only!r}: workloads are {[w.name for w in WORKLOADS]}")
    for name in ("rounds", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")

    console.enable_compilation_cache()
    loaded = console.load_model(args)
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        systems: list[System] = [Ours(loaded.model)]
        own_peak = _warm_up(systems, workloads)
        if not args.no_peers and loaded.source.suffix == ".gguf":
            peer_file = Path(folder) / "float32.gguf"
            write_float32_gguf(loaded.source, peer_file)
            peers = installed_peers(peer_file, os.cpu_count() or 1)
            _warm_up(peers, workloads)
            systems += peers
        total = args.rounds * len(workloads) * len(systems)
        with console.progress(total, unit="run", description="timing") as bar:
            for seed in range(args.rounds):
                for workload in workloads:
                    for system in systems:
                        rate = workload.tokens_per_second(system, args.steps, seed)
                        rates.setdefault(system.name, {}).setdefault(workload.name, []).append(rate)
                        bar.update()
    medians = {
        system: {name: statistics.median(values) for name, values in row.items()}
        for system, row in rates.items()
    }
    if args.json:
        print(json.dumps({"tokens_per_second": medians, "peak_rss_mib": own_peak}))
    else:
        print(_table(medians, own_peak))
    return 0


def _warm_up(systems: list[System], workloads: list[Workload]) -> dict[str, int]:
    """Runs each workload once, compiling what it needs; returns the peak RSS after each, MiB."""
    peaks = {}
    for workload in workloads:
        for system in systems:
            workload.tokens_per_second(system, 2, seed=0)
        peaks[workload.name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MIB
    return peaks


def _table(medians: dict[str, dict[str, float]], own_peak: dict[str, int]) -> str:
    """The medians as Markdown, with each peer's ratio."""
    names = list(medians[Ours.name])
    lines = ["| tokens/s | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for system, row in medians.items():
        lines.append(f"| {system} | " + " | ".join(f"{row[name]:.1f}" for name in names) + " |")
    for system in list(medians)[1:]:
        ratios = (medians[Ours.name][name] / medians[system][name] for name in names)
        lines.append(f"| jaxkv / {system} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
    lines.append("| jaxkv peak RSS so far, MiB | " + " | ".join(map(str, own_peak.values())) + " |")
    return "\n".join(lines)
