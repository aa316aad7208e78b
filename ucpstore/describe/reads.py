"""Reads into tensors: every check of a single tensor, and new memory where none is in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.dtensor import like
from ucpstore.describe.kinds import array_path, is_scalar, saved_scalar, what
from ucpstore.describe.numpys import Array, writable
from ucpstore.describe.place import Place
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.target import ArrayInfo, Arrays, Differences, Read, dtype_problem
from ucpstore.describe.tensors import (
    Memory,
    dtype_name,
    hold,
    memory_of,
    overlaps_itself,
    plain,
    share_elements,
)
from ucpstore.errors import CorruptError, MismatchError, UnsupportedError
from ucpstore.geometry import Piece
from ucpstore.tree.nodes import Node


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """Memory that is read into; the tensors are kept, so that their memory is not used again."""

    path: str
    place: Place
    target: torch.Tensor
    local: torch.Tensor


@dataclass(slots=True, eq=False)
class Reads:
    """Collects the reads of one load. Each method checks one thing and adds to `differences`."""

    ranks: Ranks
    arrays: Arrays
    cast: Sequence[str]
    differences: Differences = field(default_factory=Differences)
    found: list[Read] = field(default_factory=list)
    values: list[Callable[[], None]] = field(default_factory=list)
    _claimed: dict[Memory, _Claim] = field(default_factory=dict)

    def tensor(self, target: torch.Tensor, node: Node, place: Place) -> None:
        """Fill a tensor of the state in place."""
        self.differences.attempt(self._tensor, target, node, place)

    def is_claimed(self, target: torch.Tensor) -> bool:
        """Whether something else is read into the same memory."""
        memory = memory_of(target)
        return memory is not None and memory in self._claimed

    def numpy(self, target: Array, node: Node, place: Place) -> None:
        """Fill a numpy array of the state in place; foreign byte order is converted at the end."""
        self.differences.attempt(self._numpy, target, node, place)

    def fresh(
        self,
        node: Node,
        place: Place,
        *,
        like_tensor: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """New memory for a stored array, in the layout of `like_tensor`.

        Of the stored dtype, or of that of `like_tensor` where `cast` allows it and it is wider: a
        state that was cast when it was saved has to work with its parameter again.
        """
        info = self.info(array_path(node))
        dtype = dtypes.to_torch(info.dtype)
        if like_tensor is not None and any(fnmatchcase(place.shown, each) for each in self.cast):
            other = like_tensor.dtype
            alike = dtypes.kind(info.dtype) == dtypes.kind(dtype_name(other, place.shown))
            dtype = other if alike and other.itemsize > dtype.itemsize else dtype
        if isinstance(like_tensor, DTensor):
            made: torch.Tensor = like(like_tensor, dtype)
        elif like_tensor is not None:
            made = torch.empty_like(like_tensor.detach(), dtype=dtype)
        else:
            made = torch.empty(info.shape, dtype=dtype, device=device)
        self.tensor(made, node, place)
        return made

    def raw(self, path: str, local: torch.Tensor, pieces: tuple[Piece, ...]) -> None:
        """Read without any check."""
        if pieces:
            self.found.append(Read(path, local, pieces, self.info(path).dtype))

    def info(self, path: str | None) -> ArrayInfo:
        """Shape and dtype of a stored array that the tree names."""
        info = None if path is None else self.arrays.get(path)
        if info is None:
            raise CorruptError(f"{path}: the tree names an array that the metadata does not have")
        return info

    def checked_dtype(self, stored: str, wanted: torch.dtype, place: Place) -> None:
        """Raise MismatchError unless values of `stored` may be put into a target of `wanted`."""
        problem = dtype_problem(place.shown, stored, dtype_name(wanted, place.shown), self.cast)
        if problem:
            raise MismatchError(problem)

    def _tensor(self, target: torch.Tensor, node: Node, place: Place) -> None:
        path = array_path(node)
        if path is not None:
            self._array(target, path, place)
        elif is_scalar(node):
            self._scalar(target, node, place)
        else:
            raise MismatchError(
                f"{place.shown}: the target is a tensor, but {what(node)} was saved"
            )

    def _array(self, target: torch.Tensor, path: str, place: Place) -> None:
        info = self.info(path)
        if target.is_conj() or target.is_neg():
            raise UnsupportedError(
                f"{place.shown}: a view with a pending conjugation or negation cannot be loaded "
                "into; use a tensor of its own"
            )
        held = hold(target, self.ranks, place.shown)
        if held.shape != info.shape:
            raise MismatchError(
                f"{place.shown}: stored with shape {info.shape}, the target has shape {held.shape}"
            )
        self.checked_dtype(info.dtype, held.local.dtype, place)
        if overlaps_itself(held.local):
            raise MismatchError(
                f"{place.shown}: the target is expanded, several of its elements are the same "
                "memory; use its contiguous() copy"
            )
        memory = memory_of(target)
        claim = _Claim(path, place, target, held.local)
        known = claim if memory is None else self._claimed.setdefault(memory, claim)
        if known is claim:
            self.raw(path, held.local, held.pieces)
        elif known.path != path:
            self._tied(held.local, held.pieces, claim, known)

    def _tied(
        self, local: torch.Tensor, pieces: tuple[Piece, ...], claim: _Claim, known: _Claim
    ) -> None:
        """Two stored arrays for the same memory: refused, or over items compared once read.

        Ties do not reach over items in a checkpoint, so that items can be loaded one by one.
        """
        both = f"{known.place.shown} and {claim.place.shown}: tied in the target, but"
        if known.place.item == claim.place.item:
            raise MismatchError(
                f"{both} two tensors in the checkpoint; untie them in the target, or load only one"
            )
        again = torch.empty_like(local)
        self.raw(claim.path, again, pieces)

        def compare() -> None:
            if not _same_bits(again, local):
                raise MismatchError(
                    f"{both} the checkpoint has different values for them; untie them in the "
                    "target, or load only one. The target is undefined now"
                )

        self.values.append(compare)

    def refuse_overlaps(self) -> None:
        """Refuse targets that are different views with common elements."""
        by_storage: dict[int, list[_Claim]] = {}
        for claim in self._claimed.values():
            if claim.local.numel():
                storage = claim.local.untyped_storage()._cdata
                by_storage.setdefault(storage, []).append(claim)
        for claims in by_storage.values():
            for one, other in _pairs(claims):
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

    def _scalar(self, target: torch.Tensor, node: Node, place: Place) -> None:
        saved = saved_scalar(node)
        if target.dim():
            raise MismatchError(
                f"{place.shown}: stored with shape (), the target has shape {tuple(target.shape)}"
            )
        if isinstance(target, DTensor):
            target = hold(target, self.ranks, place.shown).local
            if target.dim():
                return  # a rank outside of the mesh
        local = plain(target, place.shown)
        self.checked_dtype(dtypes.to_name(saved.dtype), local.dtype, place)
        self.values.append(lambda: _fill(local, saved))


def _fill(local: torch.Tensor, saved: torch.Tensor) -> None:
    with torch.no_grad():
        local.copy_(saved)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    pair = [side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(*pair)


def _pairs(claims: Sequence[_Claim]) -> Iterator[tuple[_Claim, _Claim]]:
    """Neighbours, by where they start, that share elements."""
    ordered = sorted(claims, key=lambda claim: claim.local.data_ptr())
    for at, one in enumerate(ordered):
        end = one.local.data_ptr() + _span_bytes(one.local)
        for other in ordered[at + 1 :]:
            if other.local.data_ptr() >= end:
                break
            if share_elements(one.local, other.local):
                yield one, other


def _span_bytes(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
