"""The process of `device check` that uses the device: it answers one question after another.

A question is a line of JSON on stdin, `{"section", "name", "system"}`; the answer is a line on
stdout with the cells of that row, and with `last` if the process takes no more questions. The first
line describes the device. If a kernel hangs or ends the process, only its own answer is lost:
`device check` starts another process. This module is not a command.

Without a GPU the kernel is simulated, on toy sizes, and nothing is timed.
"""

import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.targets.cases import NAMES
from scripts.device.correct import EXTRAS, check, difference, random_input
from scripts.device.peers import SYSTEMS, Attend, Input, Jitted, Unavailable

COPY_BYTES = 1 << 30
PACKAGES = ("jax", "jaxlib", "torch", "flashinfer-python", "flash-attn-3")
MODEL = "smollm2-135m, 32 x 512"
Found = dict[str, Any]  # the cells of a row


@dataclass(frozen=True, kw_only=True)
class Load:
    """A decode step to time; the letters are those of the README."""

    name: str
    lens: Sequence[int]
    dtype: Any = jnp.bfloat16
    H: int = 32
    K: int = 8
    D: int = 128
    P: int = 64

    def input(self) -> Input:
        """Returns random queries and pages."""
        return random_input(self.lens, self.dtype, self.H, self.K, self.D, self.P)

    @property
    def bytes(self) -> int:
        """Bytes of live K and V."""
        size = jnp.dtype(self.dtype).itemsize
        return sum(self.lens) * 2 * self.K * (self.D * size + (4 if size == 1 else 0))


def loads() -> list[Load]:
    """Returns the loads to time, the most important first."""
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


class Timed:
    """The input of a load, and the output of `xla` for it.

    Attributes:
      load: the load.
    """

    def __init__(self, load: Load):
        self.load = load
        self._given = load.input()
        self._xla = SYSTEMS["xla"](self._given)
        self._truth: np.ndarray | None = None
        with contextlib.suppress(Exception):  # the row of `xla` gives the reason
            self._truth = _numpy(self._xla())

    def run(self, system: str, real: bool) -> Found:
        """Returns the error of a system and, on a GPU, its time.

        Raises:
          Unavailable: the system cannot run here.
          ValueError: its answer is wrong.
        """
        attend = self._xla if system == "xla" else SYSTEMS[system](self._given)
        out, found = _numpy(attend()), {}
        if self._truth is not None:
            found = dict(off=difference(out, self._truth, name="out"))
        if not real:
            return found
        found |= _timed(attend)
        return found | dict(bytes_per_second=self.load.bytes / found["seconds"])


TOY_NAMES = ("decode-bf16-h4-k2-d64-p16", "prefill-bf16-h4-k2-d64-p16")
TOY_LOADS = [Load(name="3 x 40", lens=[40] * 3, H=4, K=2, D=64, P=16)]


def questions(real: bool) -> Iterator[tuple[str, str, str]]:
    """Returns section, name and system of all rows, in order."""
    for name in (*(NAMES if real else TOY_NAMES), *EXTRAS):
        yield "correct", name, "mosaic_gpu"
    yield "copy", f"{COPY_BYTES >> 30} GiB", "xla"
    for load in loads() if real else TOY_LOADS:
        for system in SYSTEMS:
            yield "decode", load.name, system
    for system in ("mosaic_gpu", "xla"):
        yield "model", MODEL, system


@dataclass
class Answers:
    """Measures the cells of rows.

    Attributes:
      real: there is a GPU.
      timed: the load of the last question.
    """

    real: bool
    timed: Timed | None = None

    def find(self, section: str, name: str, system: str) -> Found:
        """Returns the cells of a row; without a result `reason`, and `failed` if it is a fault."""
        try:
            return getattr(self, f"_{section}")(name, system)
        except Exception as error:  # the failure of one system must not affect other rows
            reason = str(error).strip().partition("\n")[0][:160]
            found: Found = dict(reason=reason or type(error).__name__)
            return found if isinstance(error, Unavailable) else found | dict(failed=True)

    def _correct(self, name: str, system: str) -> Found:
        return dict(error=check(name, simulated=not self.real))

    def _copy(self, name: str, system: str) -> Found:
        self._only_real()
        source = jnp.ones((COPY_BYTES // 4,), jnp.float32)
        timed = _timed(Jitted(jax.jit(lambda x: x + 1), (source,)))
        return timed | dict(bytes_per_second=2 * COPY_BYTES / timed["seconds"])

    def _decode(self, name: str, system: str) -> Found:
        if not self.real and system not in ("mosaic_gpu", "xla"):
            raise Unavailable("not run: simulated")
        if self.timed is None or self.timed.load.name != name:
            self.timed = None  # frees its memory
            every = (*loads(), *TOY_LOADS)
            self.timed = Timed(next(load for load in every if load.name == name))
        return self.timed.run(system, self.real)

    def _model(self, name: str, system: str) -> Found:
        """Times decode steps of SmolLM2-135M in bfloat16 through the engine."""
        self._only_real()
        self.timed = None
        return dict(tokens_per_second=_tokens_per_second(system, batch=32, context=512))

    def _only_real(self) -> None:
        if not self.real:
            raise Unavailable("not timed: simulated")


def _numpy(x: Any) -> np.ndarray:
    """Converts an array of jax or torch to float32."""
    return np.asarray(x, np.float32) if isinstance(x, jax.Array) else x.float().cpu().numpy()


def _timed(attend: Attend, rounds: int = 20) -> Found:
    """Returns the median time on the device, and the clock that measured it."""
    if not isinstance(attend, Jitted):
        return dict(seconds=_torch_seconds(attend, rounds), clock="events")
    with contextlib.suppress(Exception):  # if CUPTI is not available
        from jax.experimental.mosaic.gpu import profiler

        measure = profiler.measure(attend.function, aggregate=True, iterations=rounds)
        _, milliseconds = measure(*attend.arrays)
        if milliseconds:
            return dict(seconds=statistics.median(milliseconds) / 1e3, clock="cupti")
    start = time.perf_counter()
    jax.block_until_ready([attend() for _ in range(rounds)])
    return dict(seconds=(time.perf_counter() - start) / rounds, clock="wall")


def _torch_seconds(attend: Callable[[], Any], rounds: int) -> float:
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


def _tokens_per_second(backend: str, batch: int, context: int, steps: int = 24) -> float:
    from jaxkv.engine import Engine, EngineConfig, Request
    from jaxkv.models.errors import ModelError
    from jaxkv.models.loading import load_model

    try:
        model = load_model("smollm2-135m", "bfloat16").model
    except (ModelError, OSError) as error:
        raise Unavailable(f"no model: {error}") from None
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


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


def _is_usable() -> bool:
    """Whether the device still runs programs: after some faults it runs none."""
    try:
        jax.block_until_ready(jnp.zeros((8,)) + 1)
    except Exception:
        return False
    return True


def serve(asked: TextIO, answers: TextIO) -> None:
    """Answers until `asked` ends, or the device no longer runs programs."""

    def say(message: Found) -> None:
        print(json.dumps(message), file=answers, flush=True)

    real = jax.default_backend() == "gpu"
    device = jax.devices()[0].device_kind if real else "simulated"
    say(dict(device=device, real=real, versions=dict(_versions())))
    known = Answers(real)
    with contextlib.nullcontext() if real else plgpu.force_gpu_interpret_mode():
        for line in asked:
            found = known.find(**json.loads(line))
            if found.get("failed") and not _is_usable():
                return say(found | dict(last=True))
            say(found)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other systems need memory too
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries must not print into the answers
    serve(sys.stdin, channel)
