"""Which rank this process is in the call's process group, and how global ranks map to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from ucpstore.errors import StateError, UnsupportedError
from ucpstore.spec import Spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Mesh:
    """Extents of a device mesh's axes, and its ranks of the process group in row-major order."""

    axes: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The process group of a call, as one of its members sees it.

    `of_global` maps each global rank of the group to its rank in the group. `spec` says how plain
    tensors lie over the ranks; None: each rank that has one holds all of it.
    """

    rank: int
    of_global: Mapping[int, int]
    spec: Spec | None = None
    _meshes: dict[int, tuple[DeviceMesh, Mesh]] = field(default_factory=dict, repr=False)
    """By identity; torch builds the tensor of a mesh's ranks anew on each look."""
    shardings: dict[tuple[object, ...], object] = field(default_factory=dict, repr=False)
    """What `tensors.dtensor.sharding_of` has worked out."""

    def mesh(self, mesh: DeviceMesh, where: str) -> Mesh:
        """Extents and members of a device mesh; StateError, naming `where`, if some are outside."""
        known = self._meshes.get(id(mesh))
        if known is None:
            known = self._meshes[id(mesh)] = (mesh, self._mesh(mesh, where))
        return known[1]

    def _mesh(self, mesh: DeviceMesh, where: str) -> Mesh:
        layout = mesh.mesh
        members = [int(rank) for rank in layout.flatten().tolist()]
        outside = [rank for rank in members if rank not in self.of_global]
        if outside:
            raise StateError(
                f"{where}: its device mesh has the global ranks {members}, of which {outside} are "
                "not in the process group of the call (global ranks "
                f"{sorted(self.of_global)}); pass a process group that holds the whole mesh"
            )
        return Mesh(
            tuple(int(extent) for extent in layout.shape),
            tuple(self.of_global[rank] for rank in members),
        )

    def line(self, members: Sequence[int], parts: int | None, where: str) -> Mesh:
        """A mesh of global ranks, `parts` of them (all where None) times as many as are left."""
        if self.spec is not None:
            raise UnsupportedError(
                f"{where}: it tells itself how it lies over the ranks, which does not go together "
                "with a specification; leave spec out"
            )
        outside = [rank for rank in members if rank not in self.of_global]
        if outside:
            raise StateError(
                f"{where}: it lies on the global ranks {list(members)}, of which {outside} are not "
                f"in the process group of the call (global ranks {sorted(self.of_global)}); pass "
                "a process group that holds all"
            )
        parts = len(members) if parts is None else parts
        ranks = tuple(self.of_global[rank] for rank in members)
        return Mesh((parts, len(members) // parts), ranks)

    def key(self, name: str) -> str:
        """The full name in the tree of what this rank has under the full name `name`."""
        return name if self.spec is None else self.spec.key(name, self.rank)

    def stored(self, name: str) -> str:
        """The full name of its array, that of another tensor where it is tied to one."""
        return name if self.spec is None else self.spec.stored(name, self.rank)

    @property
    def count(self) -> int:
        """Number of ranks in the process group."""
        return len(self.of_global)

    @staticmethod
    def here(
        of_global: Mapping[int, int], rank: int | None = None, spec: Spec | None = None
    ) -> Ranks:
        """This process's place; `rank` is asked for only where torch.distributed cannot tell."""
        if spec is not None:
            spec = spec.in_group(of_global)
        if rank is not None:
            return Ranks(rank, of_global, spec)
        if len(of_global) == 1:
            return Ranks(next(iter(of_global.values())), of_global, spec)
        if dist.is_available() and dist.is_initialized():
            own = dist.get_rank()
            if own in of_global:
                return Ranks(of_global[own], of_global, spec)
            raise StateError(
                f"this process has global rank {own}, which is not in the process group of the "
                f"call (global ranks {sorted(of_global)}); call from its members only"
            )
        raise StateError(
            f"the process group of the call has {len(of_global)} ranks, but torch.distributed is "
            "not initialised here; initialise it first"
        )
