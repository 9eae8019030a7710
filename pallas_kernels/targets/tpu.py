"""TPUs to compile for, none of which need be here: libtpu holds the compilers of all of them.

libtpu is looked for where TPU_LIBRARY_PATH says, in the folder `targets` of the virtual environment
(`make setup` puts it there), and among the installed packages.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

ARRAYS = 4  # matrix units of a core that together give its peak rate


class TargetUnavailable(RuntimeError):
    """The compiler of a target is not installed."""


def find_compiler() -> Path | None:
    """Where libtpu is, if it is anywhere."""
    package = importlib.util.find_spec("libtpu")
    places = [
        os.environ.get("TPU_LIBRARY_PATH"),
        Path(sys.prefix, "targets", "libtpu", "libtpu.so"),
        package and package.origin and Path(package.origin).with_name("libtpu.so"),
    ]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


@dataclass(frozen=True)
class TpuTarget:
    """A kind of TPU.

    Attributes:
      name: as Google's documents have it, without "TPU".
      topology: the smallest one that libtpu describes.
    """

    name: str
    topology: str

    @cached_property
    def device(self) -> Any:
        """One device of the topology.

        Raises:
          TargetUnavailable: libtpu is not installed.
        """
        compiler = find_compiler()
        if compiler is None:
            raise TargetUnavailable(
                f"cannot compile for TPU {self.name} without libtpu: `make setup` installs it, "
                "where the platform has it"
            )
        os.environ["TPU_LIBRARY_PATH"] = str(compiler)
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no server what machine this is
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody owns an absent chip
        return topologies.get_topology_desc(self.topology, "tpu").devices[0]

    @property
    def info(self) -> pltpu.TpuInfo:
        """What Pallas knows of the chip."""
        with self.lowering():
            return pltpu.get_tpu_info()

    @property
    def clock_hz(self) -> float:
        """Of a core, from its peak rate of bfloat16 products."""
        info = self.info
        return info.bf16_ops_per_second / (2 * ARRAYS * info.mxu_column_size**2)

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Inside, Pallas lowers for this chip."""
        kind = AbstractDevice(device_kind=self.device.device_kind, num_cores=1, platform="tpu")
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
        with jax.sharding.use_abstract_mesh(mesh):
            yield

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        """Compiles a function of pytrees of `jax.ShapeDtypeStruct`.

        Returns:
          The compiled program, with its `memory_analysis()`.

        Raises:
          TargetUnavailable: libtpu is not installed.
          jax.errors.JaxRuntimeError: the compiler refuses the program.
        """
        here = SingleDeviceSharding(self.device)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), list(arguments)
        )
        with self.lowering():
            traced = jax.jit(function, donate_argnums=donate_argnums).trace(*placed)
            return traced.lower(lowering_platforms=("tpu",)).compile()


TPU_TARGETS = {
    target.name: target
    for target in (
        TpuTarget("v4", "v4:2x2x1"),
        TpuTarget("v5e", "v5e:2x2"),
        TpuTarget("v5p", "v5p:2x2x1"),
        TpuTarget("v6e", "v6e:2x2"),
        TpuTarget("7x", "tpu7x:2x2x1"),
    )
}
