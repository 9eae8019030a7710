"""Check and time the GPU kernel on the GPU that is here, in one bounded run.

  python scripts device check
  python scripts device check --minutes 3 --json check.json --no-model

First each named shape against the `reference` backend; then decode attention beside the systems
that can be had here: median time on the device, bytes of live K and V a second, and their share of
what a plain copy reaches (each load is far more than an L2 holds, which is so cold every time);
then decode steps of SmolLM2. What does not fit into
the minutes, or cannot be had, has a row that says so. The table comes last; rows are saved to the
JSON file as they are found.

Without a GPU the kernel is simulated, on toy sizes, and nothing is timed: the program itself is
what is checked then.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Pages, SymmetricPages, ragged_paged_attention
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.targets.cases import NAMES, Shape
from scripts import console
from scripts.device_peers import SYSTEMS, Attend, Input, Jitted, Unavailable

TOLERANCE = 2e-2
COPY_BYTES = 2 << 30
CHECKED_TOKENS = 1024  # of a sequence, at most: the reference takes all of a table at once
MODEL_MINUTES = 1.5  # that are left for the model's steps
Found = dict[str, Any]  # the cells of a row


@dataclass(frozen=True, kw_only=True)
class Load:
    """A decode step to time; letters as in the README."""

    name: str
    lens: Sequence[int]
    dtype: Any = jnp.bfloat16
    H: int = 32
    K: int = 8
    D: int = 128
    P: int = 64

    def input(self) -> Input:
        """Random queries and pages."""
        return _input(self.lens, self.dtype, self.H, self.K, self.D, self.P)


def loads() -> list[Load]:
    """What is timed, most wanted first."""
    ragged = np.random.default_rng(0).integers(256, 8193, 64).tolist()
    codes = [("int8", jnp.int8), ("e4m3", jnp.float8_e4m3fn)]
    return [
        Load(name="64 x 4k", lens=[4096] * 64),
        Load(name="8 x 32k", lens=[32768] * 8),
        Load(name="64 x 256..8k", lens=ragged),
        *(Load(name=f"64 x 4k, {name}", lens=[4096] * 64, dtype=code) for name, code in codes),
        Load(name="1 x 128k", lens=[131072]),
        Load(name="64 x 4k, pages of 16", lens=[4096] * 64, P=16),
        Load(name="64 x 4k, MQA", lens=[4096] * 64, H=8, K=1),
    ]


TOY_NAMES = ("decode-bf16-h4-k2-d64-p16", "prefill-bf16-h4-k2-d64-p16")
TOY_LOADS = [Load(name="3 x 40", lens=[40] * 3, H=4, K=2, D=64, P=16)]


@dataclass
class Report:
    """The rows found so far, and the time that is left.

    Attributes:
      path: of the JSON file.
      deadline: by `time.monotonic`.
      device, versions: where this ran.
    """

    path: Path
    deadline: float
    device: str
    versions: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, section: str, name: str, system: str, **found: Any) -> None:
        """Adds a row, and saves all."""
        self.rows.append(dict(section=section, name=name, system=system, **found))
        shown = {key: value for key, value in vars(self).items() if key not in ("path", "deadline")}
        self.path.write_text(json.dumps(shown, indent=1) + "\n")

    def run(
        self, section: str, name: str, system: str, find: Callable[[], Found], reserve: float = 0
    ) -> None:
        """Adds a row of what `find` returns, or why there is nothing.

        Args:
          section, name, system: of the row.
          find: measures.
          reserve: seconds that must be left besides.
        """
        found: Found = {}
        try:
            if time.monotonic() > self.deadline - reserve:
                raise Unavailable("no time was left")
            found = find()
        except Exception as error:  # one system's failure may not cost the others' rows
            reason = str(error).strip().partition("\n")[0][:120]
            found = dict(reason=reason or type(error).__name__)
            if not isinstance(error, Unavailable):
                found["failed"] = True
        self.add(section, name, system, **found)


def main(argv: list[str]) -> int:
    """Runs the check; returns 1 where a result was wrong, or ours failed."""
    parser = console.Parser("device check", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=6, help="that it may take (default: %(default)s)")
    add(
        "--json",
        type=Path,
        default=Path("device_check.json"),
        metavar="PATH",
        help="where rows are saved (default: %(default)s)",
    )
    add("--no-model", action="store_true", help="leave out the model's steps")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error("--minutes must be above 0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other systems want memory too
    real = jax.default_backend() == "gpu"
    packages = ("jax", "jaxlib", "torch", "flashinfer-python", "flash-attn-3")
    report = Report(
        path=args.json,
        deadline=time.monotonic() + 60 * args.minutes,
        device=jax.devices()[0].device_kind if real else "simulated",
        versions=dict(_versions(packages)),
    )
    reserve = 0.0 if args.no_model else 60 * min(MODEL_MINUTES, args.minutes / 4)
    simulated = contextlib.nullcontext() if real else plgpu.force_gpu_interpret_mode()
    with simulated:
        # Half of the time is the tables'.
        _check_shapes(report, NAMES if real else TOY_NAMES, max(reserve, 30 * args.minutes))
        _time_systems(report, loads() if real else TOY_LOADS, real, reserve)
    if not args.no_model:
        _time_model(report, real)
    print(_table(report))
    return int(any(row.get("failed") and row["system"] == "mosaic_gpu" for row in report.rows))


def _versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


def _check_shapes(report: Report, names: Sequence[str], reserve: float) -> None:
    """Each shape of ours against the reference, on lengths up to CHECKED_TOKENS."""
    with console.progress(len(names), unit="shape", description="checking") as bar:
        for name in names:
            check = functools.partial(_check, Shape.parse(name))
            report.run("correct", name, "mosaic_gpu", check, reserve)
            bar.update()


def _check(shape: Shape) -> Found:
    simulated = jax.default_backend() != "gpu"
    T, B = (12, 3) if simulated else (shape.T, shape.B)
    rng = np.random.default_rng(1)
    if shape.T == shape.B:
        T, q_lens = B, [1] * B
    else:  # as the name has it: some sequences of one query, the others share the rest
        singles = 0 if shape.B < 64 else 64
        q_lens = [1] * singles + [(T - singles) // (B - singles)] * (B - singles)
    longest = 40 if simulated else CHECKED_TOKENS
    lens = [int(n) + more for n, more in zip(q_lens, rng.integers(0, longest, B), strict=True)]
    q: Any = shape.q
    table: Any = jax.ShapeDtypeStruct((B, 1), jnp.int32)
    if reason := mosaic_gpu.refusal(q, shape.pages("head_major"), table):
        raise Unavailable(f"refused: {reason}")
    given = _input(lens, shape.dtype, shape.H, shape.K, shape.D, shape.P, T=T)
    starts = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)

    def attend(backend: str) -> tuple[np.ndarray, np.ndarray]:
        out, lse = ragged_paged_attention(
            given.q,
            given.pages,
            given.table,
            given.kv_lens,
            starts,
            scale=given.scale,
            window=shape.window,
            return_lse=True,
            backend=backend,
        )
        return np.asarray(out, np.float32), np.asarray(lse)

    off = [np.abs(a - b) for a, b in zip(attend("mosaic_gpu"), attend("reference"), strict=True)]
    error = max(float(x[np.isfinite(x)].max()) for x in off)
    if not error <= TOLERANCE or np.isnan(off[0]).any():
        raise ValueError(f"off by {error:.1e}")
    return dict(error=error)


def _input(
    lens: Sequence[int], dtype: Any, H: int, K: int, D: int, P: int, T: int | None = None
) -> Input:
    """Random queries and pages, these in random order."""
    B, M = len(lens), max(-(-n // P) for n in lens)
    N = 1 + sum(-(-n // P) for n in lens)
    ids = iter(np.random.default_rng(2).permutation(np.arange(1, N)))
    table = np.zeros((B, M), np.int32)
    for b, n in enumerate(lens):
        table[b, : -(-n // P)] = [next(ids) for _ in range(-(-n // P))]
    of_q, of_kv = jax.random.split(jax.random.key(0))
    shape = (N, 2 * K, P, D)
    itemsize = jnp.dtype(dtype).itemsize

    @jax.jit
    def make() -> Any:
        if itemsize > 1:
            kv = jax.random.normal(of_kv, shape, jnp.bfloat16).astype(dtype)
            return Pages(kv=kv, layout="head_major")
        codes = jax.random.randint(of_kv, shape, -127, 128, jnp.int8)
        scales = jnp.full(shape[:-1], 1 / 64, jnp.float32)
        if dtype != jnp.int8:
            codes = (codes.astype(jnp.float32) / 32).astype(dtype)
            scales = scales * 32
        return SymmetricPages(kv=codes, scales=scales, layout="head_major")

    q = jax.random.normal(of_q, (T or B, H, D), jnp.bfloat16)
    if dtype == jnp.float32:
        q = q.astype(dtype)
    return Input(q=q, pages=make(), table=jnp.asarray(table), lens=tuple(lens))


def _time_systems(report: Report, wanted: Sequence[Load], real: bool, reserve: float) -> None:
    copied = 0.0

    def copy() -> Found:
        nonlocal copied
        if not real:
            raise Unavailable("not timed: simulated")
        source = jnp.ones((COPY_BYTES // 4,), jnp.float32)
        seconds = _seconds(Jitted(jax.jit(lambda x: x + 1), (source,)))
        copied = 2 * COPY_BYTES / seconds
        return dict(seconds=seconds, bytes_per_second=copied)

    report.run("copy", console.format_bytes(COPY_BYTES), "xla", copy, reserve)
    with console.progress(len(wanted) * len(SYSTEMS), unit="run", description="timing") as bar:
        for load in wanted:
            given = load.input()
            answers: list[np.ndarray] = []  # ours first, which was held to the reference

            def attend(
                prepare: Callable[[Input], Attend],
                load: Load = load,
                given: Input = given,
                answers: list[np.ndarray] = answers,
            ) -> Found:
                attend = prepare(given)
                answers.append(_numpy(attend()))
                off = float(np.abs(answers[-1] - answers[0]).max())
                timed = _rate(load, _seconds(attend), copied) if real else {}
                return dict(off=off, **timed)

            for name, prepare in SYSTEMS.items():
                report.run("decode", load.name, name, functools.partial(attend, prepare), reserve)
                bar.update()


def _numpy(x: Any) -> np.ndarray:
    """Of jax or of torch, as float32."""
    return np.asarray(x, np.float32) if isinstance(x, jax.Array) else x.float().cpu().numpy()


def _rate(load: Load, seconds: float, copied: float) -> Found:
    size = jnp.dtype(load.dtype).itemsize
    token = 2 * load.K * (load.D * size + (4 if size == 1 else 0))
    rate = sum(load.lens) * token / seconds
    share = rate / copied if copied else None
    return dict(seconds=seconds, bytes_per_second=rate, share_of_copy=share)


def _seconds(attend: Attend, rounds: int = 20) -> float:
    """Median time on the device."""
    if not isinstance(attend, Jitted):
        return _torch_seconds(attend, rounds)
    from jax.experimental.mosaic.gpu import profiler

    with contextlib.suppress(RuntimeError):  # where CUPTI is not to be had
        measure = profiler.measure(attend.function, aggregate=True, iterations=rounds)
        _, milliseconds = measure(*attend.arrays)
        if milliseconds:
            return statistics.median(milliseconds) / 1e3
    start = time.perf_counter()
    jax.block_until_ready([attend() for _ in range(rounds)])
    return (time.perf_counter() - start) / rounds


def _torch_seconds(attend: Attend, rounds: int) -> float:
    import torch  # pyright: ignore[reportMissingImports]

    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attend()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _time_model(report: Report, real: bool) -> None:
    """Decode steps of SmolLM2-135M in bfloat16 through the engine."""

    def decode(backend: str) -> Found:
        if not real:
            raise Unavailable("not timed: simulated")
        return dict(tokens_per_second=_tokens_per_second(backend, batch=32, context=512))

    for backend in ("mosaic_gpu", "xla"):
        find = functools.partial(decode, backend)
        report.run("model", "smollm2-135m, 32 x 512", backend, find)


def _tokens_per_second(backend: str, batch: int, context: int, steps: int = 24) -> float:
    from jaxkv.engine import Engine, EngineConfig, Request
    from models.loading import load_model

    model = load_model("smollm2-135m", "bfloat16").model
    config = EngineConfig(
        max_sequences=batch,
        pool_tokens=batch * 2 * context,
        kv_format="bf16",
        backend=backend,
        prefix_cache=False,
    )
    engine = Engine(model, config)
    prompts = np.random.default_rng(0).integers(100, 20_000, (batch, context)).tolist()
    requests = [Request(prompt=tuple(p), max_new_tokens=steps + batch + 8) for p in prompts]
    running = [engine.submit(request) for request in requests]
    while any(not completion.tokens for completion in running):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return batch / statistics.median(times)


def _table(report: Report) -> str:
    """All rows as Markdown, under what they were found on."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {report.device}, {versions}",
        "",
        "| | case | system | time, us | GB/s | of copy | tokens/s | off by | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        off = row.get("error", row.get("off"))
        cells = [
            row["section"],
            row["name"],
            row["system"],
            _shown(row.get("seconds"), 1e6, ".1f"),
            _shown(row.get("bytes_per_second"), 1e-9, ".0f"),
            _shown(row.get("share_of_copy"), 1, ".0%"),
            _shown(row.get("tokens_per_second"), 1, ".0f"),
            _shown(off, 1, ".1e"),
            ("FAILED: " if row.get("failed") else "") + row.get("reason", "").replace("|", "/"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: float | None, factor: float, style: str) -> str:
    return "" if value is None else format(value * factor, style)
