"""TPUs to compile for, none of which need be here: libtpu holds the compilers of all of them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

ARRAYS = 4  # matrix units of a core that together give its peak rate


class TargetUnavailable(RuntimeError):
    """The compiler of a target is not installed."""


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
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no server what machine this is
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody owns an absent chip
        try:
            return topologies.get_topology_desc(self.topology, "tpu").devices[0]
        except (RuntimeError, ImportError, ValueError) as error:
            raise TargetUnavailable(
                f"cannot compile for TPU {self.name}: it needs libtpu, `pip install 'jax[tpu]'`"
            ) from error

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
