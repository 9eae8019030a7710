"""A chip to compile for, which this machine need not have."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding


class TargetUnavailable(RuntimeError):
    """The compiler of a target is not installed."""


@dataclass(frozen=True)
class Target:
    """A kind of chip.

    Attributes:
      name: its name, in lower case.
      platform: the platform that programs are lowered for.
    """

    name: str
    platform: ClassVar[str]

    @cached_property
    @abstractmethod
    def device(self) -> Any:
        """One device of the kind.

        Raises:
          TargetUnavailable: its compiler is not installed.
        """

    @property
    @abstractmethod
    def abstract_device(self) -> AbstractDevice:
        """The device as Pallas describes it."""

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Makes Pallas lower for this chip, inside the context."""
        kind = self.abstract_device
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

        Args:
          function: the program.
          arguments: the types of its arguments.
          donate_argnums: arguments that are donated.

        Returns:
          The compiled program, with its `memory_analysis()`.

        Raises:
          TargetUnavailable: the compiler is not installed.
          ValueError: a kernel refuses the chip or the arguments.
          jax.errors.JaxRuntimeError: the compiler rejects the program.
        """
        here = SingleDeviceSharding(self.device)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), list(arguments)
        )
        with self.lowering():
            traced = jax.jit(function, donate_argnums=donate_argnums).trace(*placed)
            return traced.lower(lowering_platforms=(self.platform,)).compile()
