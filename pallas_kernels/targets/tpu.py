"""TPUs to compile for, which this machine need not have: libtpu has the compilers of all of them.

libtpu is searched for at TPU_LIBRARY_PATH, in the folder `targets` of the virtual environment,
where `make setup` installs it, and among the installed packages.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice

from pallas_kernels.targets.target import Target, TargetUnavailable

ARRAYS = 4  # matrix units of a core that together give its peak rate


def find_compiler() -> Path | None:
    """Returns the path of libtpu, or None if it is not installed."""
    package = importlib.util.find_spec("libtpu")
    places = [
        os.environ.get("TPU_LIBRARY_PATH"),
        Path(sys.prefix, "targets", "libtpu", "libtpu.so"),
        package and package.origin and Path(package.origin).with_name("libtpu.so"),
    ]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


@dataclass(frozen=True)
class TpuTarget(Target):
    """A kind of TPU, with the name that Google's documents use, without "TPU".

    Attributes:
      topology: the smallest topology that libtpu describes.
    """

    platform = "tpu"
    topology: str

    @cached_property
    def device(self) -> Any:
        """See `Target`."""
        compiler = find_compiler()
        if compiler is None:
            raise TargetUnavailable(
                f"cannot compile for TPU {self.name} without libtpu: `make setup` installs it, "
                "where the platform has it"
            )
        os.environ["TPU_LIBRARY_PATH"] = str(compiler)
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask a server about this machine
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no process owns an absent chip
        return topologies.get_topology_desc(self.topology, "tpu").devices[0]

    @property
    def info(self) -> pltpu.TpuInfo:
        """What Pallas knows about the chip."""
        with self.lowering():
            return pltpu.get_tpu_info()

    @property
    def clock_hz(self) -> float:
        """Clock rate of a core, from its peak rate of bfloat16 products."""
        info = self.info
        return info.bf16_ops_per_second / (2 * ARRAYS * info.mxu_column_size**2)

    @property
    def abstract_device(self) -> AbstractDevice:
        """See `Target`."""
        return AbstractDevice(device_kind=self.device.device_kind, num_cores=1, platform="tpu")


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
