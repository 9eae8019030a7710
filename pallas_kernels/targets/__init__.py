"""Compiling kernels for chips that this machine does not have, and reading the results."""

from pallas_kernels.targets.gpu import GPU_TARGETS as GPU_TARGETS
from pallas_kernels.targets.gpu import GpuTarget as GpuTarget
from pallas_kernels.targets.schedule import Schedule as Schedule
from pallas_kernels.targets.schedule import read_schedule as read_schedule
from pallas_kernels.targets.target import TargetUnavailable as TargetUnavailable
from pallas_kernels.targets.tpu import TPU_TARGETS as TPU_TARGETS
from pallas_kernels.targets.tpu import TpuTarget as TpuTarget
from pallas_kernels.targets.tpu import find_compiler as find_compiler
