"""Abstract device mesh: axis names and sizes, no devices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh. ``name`` is unique in its mesh, ``size`` counts ranks."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of one pipeline stage, outermost (slowest varying, farthest apart) axis first.

    Consecutive ranks differ along the last axis, as in ``torch.distributed.DeviceMesh``.
    """

    axes: tuple[MeshAxis, ...]

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """``Mesh.of(dp=2, tp=4)``."""
        return cls(tuple(MeshAxis(name, size) for name, size in sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def index(self, name: str) -> int:
        """Position of the axis called ``name``; KeyError if there is none."""
        for position, axis in enumerate(self.axes):
            if axis.name == name:
                return position
        raise KeyError(f"mesh {self} has no axis {name!r}")

    def __len__(self) -> int:
        return len(self.axes)

    def __str__(self) -> str:
        return "(" + ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) + ")"
