"""Reads into tensors: every check of a single tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.kinds import array_path, is_scalar, saved_scalar, what
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.reads.casts import dtype_problem
from ucpstore.describe.reads.claims import Claim, Claims
from ucpstore.describe.reads.differences import Differences
from ucpstore.describe.reads.fill import clear_padding, divide, fill, same_values
from ucpstore.describe.reads.read import ArrayInfo, Arrays, Read
from ucpstore.describe.tensors.deepspeed import gathered
from ucpstore.describe.tensors.held import Held, View, whole
from ucpstore.describe.tensors.hold import hold
from ucpstore.describe.tensors.memory import memory_of, overlaps_itself
from ucpstore.describe.tensors.numbers import wide_of
from ucpstore.describe.tensors.numpys import Array, writable
from ucpstore.describe.tensors.plain import dtype_name, plain
from ucpstore.errors import CorruptError, MismatchError, UnsupportedError
from ucpstore.geometry import Index
from ucpstore.tree.nodes import Node


@dataclass(slots=True, eq=False)
class Reads:
    """Collects the reads of one load. Each method checks one thing and adds to `differences`."""

    ranks: Ranks
    arrays: Arrays
    cast: Sequence[str]
    differences: Differences = field(default_factory=Differences)
    found: list[Read] = field(default_factory=list)
    values: list[Callable[[], None]] = field(default_factory=list)
    claims: Claims = field(default_factory=Claims)

    def tensor(
        self,
        target: torch.Tensor,
        node: Node,
        place: Place,
        owner: Owner | None = None,
        *,
        derived: bool = False,
    ) -> None:
        """Fill a tensor of the state in place.

        `owner` is what a specification goes by instead of the place. What is `derived` from
        another tensor, as a parameter from its master, may have another dtype of the kind.
        """
        self.differences.attempt(self._tensor, target, node, place, owner, derived=derived)

    def numpy(self, target: Array, node: Node, place: Place) -> None:
        """Fill a numpy array of the state in place; foreign byte order is converted at the end."""
        self.differences.attempt(self._numpy, target, node, place)

    def raw(self, path: str, *views: View) -> None:
        """Read without any check."""
        filled = tuple(view for view in views if view.pieces)
        if filled:
            self.found.append(Read(path, filled, self.info(path).dtype))

    def info(self, path: str | None) -> ArrayInfo:
        """Shape and dtype of a stored array that the tree names."""
        info = None if path is None else self.arrays.get(path)
        if info is None:
            raise CorruptError(f"{path}: the tree names an array that the metadata does not have")
        return info

    def held(self, owner: Owner) -> Held:
        """What this rank holds of a parameter."""
        return hold(owner.parameter, self.ranks, owner.full_name, owner.full_name)

    def checked_dtype(self, stored: str, wanted: torch.dtype, place: Place) -> None:
        """Raise MismatchError unless values of `stored` may be put into a target of `wanted`."""
        problem = dtype_problem(place.shown, stored, dtype_name(wanted, place.shown), self.cast)
        if problem:
            raise MismatchError(problem)

    def _tensor(
        self,
        target: torch.Tensor,
        node: Node,
        place: Place,
        owner: Owner | None = None,
        *,
        derived: bool = False,
    ) -> None:
        path = array_path(node)
        if path is not None:
            self._array(target, path, place, owner, derived=derived)
        elif is_scalar(node):
            self._scalar(target, node, place, owner)
        else:
            raise MismatchError(
                f"{place.shown}: the target is a tensor, but {what(node)} was saved"
            )

    def _array(
        self,
        target: torch.Tensor,
        path: str,
        place: Place,
        owner: Owner | None,
        *,
        derived: bool = False,
    ) -> None:
        _check_own(target, place)
        held = hold(target, self.ranks, place.shown, owner.full_name if owner else None)
        if owner is not None and owner.is_state:
            # A scaled tensor is added up from all ranks, each of which has its whole gradient.
            held = replace(held, scale=1)
        self._check(held, path, place, derived=derived)
        if overlaps_itself(held.local):
            raise MismatchError(
                f"{place.shown}: the target is expanded, several of its elements are the same "
                "memory; use its contiguous() copy"
            )
        claim = Claim(path, place, target, held.local)
        known = self.claims.add(claim, memory_of(target))
        if known is claim:
            copy = gathered(target)
            also = () if copy is None else (View(copy, whole(held.shape)),)
            self._fill(held, path, *also)
        elif known.path != path:
            self._tied(held, claim, known)

    def row(self, tensor: torch.Tensor, place: Place) -> None:
        """Claim the memory in which parts of several arrays lie; `part` fills it."""
        _check_own(tensor, place)
        claim = Claim(place.path, place, tensor, plain(tensor, place.shown))
        known = self.claims.add(claim, memory_of(tensor))
        if known is not claim:
            self.differences.problems.append(
                f"{place.shown} and {known.place.shown}: the same memory in the target; load into "
                "only one of them"
            )

    def part(self, held: Held, node: Node, place: Place, *, derived: bool = False) -> None:
        """Fill what a rank holds of one tensor of a row."""
        self.differences.attempt(self._part, held, node, place, derived=derived)

    def stack(
        self,
        held: Held,
        tensors: Sequence[torch.Tensor],
        node: Node,
        place: Place,
        *,
        derived: bool = False,
    ) -> None:
        """Fill tensors that are layers of one array."""
        for tensor in tensors:
            self.row(tensor, place)
        self.part(held, node, place, derived=derived)

    def _part(self, held: Held, node: Node, place: Place, *, derived: bool = False) -> None:
        path = array_path(node)
        if is_scalar(node) and held.shape == ():
            saved = saved_scalar(node)
            self.checked_dtype(dtypes.to_name(saved.dtype), held.local.dtype, place)
            own = saved if held.scale == 1 else saved / held.scale
            self.values += [partial(fill, view.tensor, own) for view in held.views]
            return
        if path is None:
            raise MismatchError(
                f"{place.shown}: the target is a tensor, but {what(node)} was saved"
            )
        self._check(held, path, place, derived=derived)
        self._fill(held, path)

    def _unscaled(self, held: Held, path: str) -> tuple[View, ...]:
        """The views to read into: others, of which these are made at the end, where scaled."""
        if held.scale == 1:
            return held.views
        read = self._apart(held, path)
        for own, into in zip(held.views, read, strict=True):
            self.values.append(partial(divide, own, into, held.scale))
        return read

    def _apart(self, held: Held, path: str) -> tuple[View, ...]:
        """Views like those of `held` on memory of their own, which takes every stored value."""
        dtype = held.local.dtype
        if held.scale != 1:
            dtype = wide_of(dtype, self.info(path).dtype)
        return tuple(View(torch.empty_like(v.tensor, dtype=dtype), v.pieces) for v in held.views)

    def _check(self, held: Held, path: str, place: Place, *, derived: bool = False) -> None:
        info, own = self.info(path), tuple(held.local.shape)
        if held.shape != info.shape:
            here = f" ({own} on this rank)" if own != held.shape else ""
            if held.partition is None and self.ranks.count > 1 and _may_be_part(own, info.shape):
                here = "; if each rank has a part of it, pass spec= (docs/specification.md)"
            raise MismatchError(
                f"{place.shown}: stored with shape {info.shape}, the target has shape "
                f"{held.shape}{here}"
            )
        if not (derived and dtypes.kind(info.dtype) == dtypes.kind(held.dtype)):
            self.checked_dtype(info.dtype, held.local.dtype, place)

    def _fill(self, held: Held, path: str, *also: View) -> None:
        self.raw(path, *self._unscaled(held, path), *also)
        if held.partition is not None and held.partition.padded:
            self.values += [partial(clear_padding, view) for view in held.views]

    def _tied(self, held: Held, claim: Claim, known: Claim) -> None:
        """Two stored arrays for the same memory: refused, or over items compared once read.

        Ties do not reach over items in a checkpoint, so that items can be loaded one by one.
        """
        both = f"{known.place.shown} and {claim.place.shown}: tied in the target, but"
        if known.place.item == claim.place.item:
            raise MismatchError(
                f"{both} two tensors in the checkpoint; untie them in the target, or load only one"
            )
        again = self._apart(held, claim.path)
        self.raw(claim.path, *again)

        def compare() -> None:
            pairs = zip(again, held.views, strict=True)
            if not all(same_values(one, other, held.scale) for one, other in pairs):
                raise MismatchError(
                    f"{both} the checkpoint has different values for them; untie them in the "
                    "target, or load only one. The target is undefined now"
                )

        self.values.append(compare)

    def refuse_overlaps(self) -> None:
        """Refuse targets that are different views with common elements."""
        for one, other in self.claims.overlapping():
            self.differences.problems.append(
                f"{one.place.shown} and {other.place.shown}: views of the same memory that "
                "overlap in the target; load into only one of them"
            )

    def _numpy(self, target: Array, node: Node, place: Place) -> None:
        if array_path(node) is None and not (is_scalar(node) and target.ndim == 0):
            raise MismatchError(
                f"{place.shown}: the target is a numpy array, but {what(node)} was saved"
            )
        tensor, write_back = writable(target, place.shown)
        self._tensor(tensor, node, place)
        if write_back is not None:
            self.values.append(write_back)
            self.claims.add_copied(Claim(array_path(node) or place.path, place, target, target))

    def _scalar(self, target: torch.Tensor, node: Node, place: Place, owner: Owner | None) -> None:
        saved, scale = saved_scalar(node), 1
        _check_own(target, place)
        if target.dim():
            raise MismatchError(
                f"{place.shown}: stored with shape (), the target has shape {tuple(target.shape)}"
            )
        if isinstance(target, DTensor):
            target = hold(target, self.ranks, place.shown).local
            if target.dim():
                return  # a rank outside of the mesh
        elif owner is not None and not owner.is_state:
            scale = hold(target, self.ranks, place.shown, owner.full_name).scale
        local = plain(target, place.shown)
        self.checked_dtype(dtypes.to_name(saved.dtype), local.dtype, place)
        self.values.append(lambda: fill(local, saved if scale == 1 else saved / scale))


def _may_be_part(own: Index, stored: Index) -> bool:
    return len(own) == len(stored) and all(map(operator.le, own, stored))


def _check_own(target: torch.Tensor, place: Place) -> None:
    """Refuse a target whose values are not those in its memory: a copy would be filled."""
    if target.is_conj() or target.is_neg():
        raise UnsupportedError(
            f"{place.shown}: a view with a pending conjugation or negation cannot be loaded into; "
            "use a tensor of its own"
        )
