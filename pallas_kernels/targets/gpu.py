"""NVIDIA GPUs to compile for, which this machine need not have: XLA's CUDA plugin has the compiler.

The plugin is searched for among the installed packages, and in the folder `targets/cuda` of the
virtual environment, where `make setup` installs it together with the disassembler. JAX searches for
its plugins when it is imported, so a process that compiles for GPUs starts with `environment`.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.sharding import AbstractDevice

from pallas_kernels.chips import CAPABILITIES
from pallas_kernels.targets.target import Target, TargetUnavailable

PLUGIN = "jax_cuda13_plugin"
# XLA's description of a GPU (GpuTargetConfigProto), with the numbers in which targets differ.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {processors}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
device_description_str: "{kind}"
"""


def find_compiler() -> Path | None:
    """Returns the folder that the CUDA plugin is imported from, or None if it is not installed."""
    package = importlib.util.find_spec(PLUGIN)
    installed = [Path(package.origin).parents[1]] if package and package.origin else []
    places = [*installed, Path(sys.prefix, "targets", "cuda")]
    return next((place for place in places if (place / PLUGIN).is_dir()), None)


def environment() -> dict[str, str]:
    """Returns the environment variables of a process that compiles for GPUs.

    Raises:
      TargetUnavailable: the CUDA plugin or the disassembler is not installed.
    """
    folder = find_compiler()
    if folder is None:
        raise TargetUnavailable(
            "cannot compile for NVIDIA GPUs without JAX's CUDA plugin: `make setup` installs it, "
            "where the platform has it"
        )
    root = Path(os.environ.get("CUDA_ROOT", folder / "nvidia" / "cu13"))
    if not (root / "bin" / "nvdisasm").is_file():
        raise TargetUnavailable(
            f"cannot read machine code without {root}/bin/nvdisasm: the package "
            "nvidia-cuda-nvdisasm has it, and $CUDA_ROOT says where it is"
        )
    before = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])]),
        "CUDA_ROOT": str(root),
    }


@dataclass(frozen=True)
class GpuTarget(Target):
    """A kind of GPU, with the numbers of its data sheet.

    Attributes:
      kind: the first words of the driver's name for it.
      processors: number of streaming multiprocessors.
      bandwidth: bytes per second that its memory delivers.
      memory: bytes of its memory.
      l2: bytes of its L2 cache.
      clock_ghz: boost clock.
      shared: bytes of shared memory of a processor.
    """

    platform = "cuda"
    kind: str
    processors: int
    bandwidth: float
    memory: int
    l2: int
    clock_ghz: float
    shared: int

    @cached_property
    def device(self) -> Any:
        """One device, in a process that has started with `environment`."""
        major, minor = CAPABILITIES[self.kind]
        config = _CONFIG.format(
            shared=self.shared,
            processors=self.processors,
            bandwidth=int(self.bandwidth),
            l2=self.l2,
            clock=self.clock_ghz,
            memory=self.memory,
            block=self.shared - 1024,
            major=major,
            minor=minor,
            kind=self.kind,
        )
        return topologies.get_topology_desc(
            self.name, "cuda", topology="1x1x1", target_config=config
        ).devices[0]

    @property
    def abstract_device(self) -> AbstractDevice:
        """See `Target`."""
        return AbstractDevice(device_kind=self.kind, num_cores=None, platform="gpu")


# name, kind, processors, bandwidth, memory, L2 cache, GHz, shared memory
GPU_TARGETS = {
    target.name: target
    for target in (
        GpuTarget("a100", "NVIDIA A100", 108, 2.0e12, 80 << 30, 40 << 20, 1.41, 164 << 10),
        GpuTarget("h100", "NVIDIA H100", 132, 3.35e12, 80 << 30, 50 << 20, 1.98, 228 << 10),
        GpuTarget("h200", "NVIDIA H200", 132, 4.8e12, 141 << 30, 50 << 20, 1.98, 228 << 10),
        GpuTarget("b200", "NVIDIA B200", 148, 8.0e12, 180 << 30, 126 << 20, 1.965, 228 << 10),
    )
}
