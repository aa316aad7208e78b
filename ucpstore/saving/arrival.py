"""What each rank brings to a save, and what rank 0 makes of it. Pure: bytes in, decisions out.

Ranks bring digests first. Ranks with equal digests form a class, and only one rank of each class
that is new sends the thing itself, so that a thousand ranks with one structure send one structure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ucpstore.errors import StateError

Classes = tuple[tuple[int, ...], ...]
"""Ranks with equal digests, each class in rising order, the classes by their first rank."""


def digest(data: bytes) -> str:
    """A name for `data`, equal only for equal bytes: 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class PerRankArrival:
    """One per-rank document of one rank: where it belongs, its length in bytes, its digest."""

    path: str
    axis: str
    index: int
    count: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """One rank's call of `save`, in digests."""

    step: int
    overwrite: bool
    options: str
    metadata: str
    arrays: str
    tree: str
    replicas: str
    planned: tuple[str, ...]
    """Keys of the plans that the rank has kept from earlier saves."""
    per_rank: tuple[PerRankArrival, ...]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Arrival:
        fields = json.loads(data)
        fields["planned"] = tuple(fields["planned"])
        fields["per_rank"] = tuple(PerRankArrival(**entry) for entry in fields["per_rank"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Invitation:
    """Rank 0's answer: who sends what, and the key of the plan that everyone will follow."""

    plan: str
    arrays: Classes
    send_arrays: bool
    """Whether the first rank of each class of `arrays` sends its description."""
    trees: Classes
    replicas: Classes
    """Classes whose first ranks send their replica digests; empty where all ranks agree."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        fields = json.loads(data)
        for name in ("arrays", "trees", "replicas"):
            fields[name] = tuple(tuple(ranks) for ranks in fields[name])
        return cls(**fields)


def invite(arrivals: Sequence[Arrival]) -> Invitation:
    """Compare the calls of all ranks.

    Raises StateError, naming ranks and values, where they do not ask for the same save.
    """
    for name, words in (
        ("step", "step"),
        ("overwrite", "overwrite"),
        ("options", "options (or check_replicas)"),
        ("metadata", "metadata"),
    ):
        _same(words, [getattr(arrival, name) for arrival in arrivals])
    _check_per_rank(arrivals)
    arrays = classes([arrival.arrays for arrival in arrivals])
    plan = digest(
        json.dumps(
            [arrivals[0].options, [[arrivals[ranks[0]].arrays, ranks] for ranks in arrays]]
        ).encode()
    )
    replicas = classes([arrival.arrays + arrival.replicas for arrival in arrivals])
    return Invitation(
        plan=plan,
        arrays=arrays,
        send_arrays=any(plan not in arrival.planned for arrival in arrivals),
        trees=classes([arrival.tree for arrival in arrivals]),
        replicas=replicas if len(replicas) > 1 else (),
    )


def classes(digests: Sequence[str]) -> Classes:
    """Group ranks by digest."""
    members: dict[str, list[int]] = {}
    for rank, value in enumerate(digests):
        members.setdefault(value, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


def _same(name: str, values: Sequence[object]) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            found = (
                f"rank 0 has {values[0]!r}, rank {rank} has {value!r}"
                if name in ("step", "overwrite")
                else f"rank 0 and rank {rank} differ"
            )
            raise StateError(
                f"save: every rank must pass the same {name}: {found}; "
                "call save with equal arguments on every rank of the process group"
            )


@dataclass(frozen=True, slots=True)
class PerRankRows:
    """One per-rank value of the job: `count` documents along `axis`, and who writes which.

    `writers` holds the first rank of each index, `lengths` the size in bytes of its document.
    """

    path: str
    axis: str
    count: int
    writers: tuple[int, ...]
    lengths: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PerRankRows:
        return cls(
            fields["path"],
            fields["axis"],
            fields["count"],
            tuple(fields["writers"]),
            tuple(fields["lengths"]),
        )


def per_rank_rows(arrivals: Sequence[Arrival]) -> tuple[PerRankRows, ...]:
    """The per-rank values of all ranks, sorted by path. The arrivals have been checked."""
    found: dict[str, dict[int, tuple[int, PerRankArrival]]] = {}
    for rank, arrival in enumerate(arrivals):
        for entry in arrival.per_rank:
            found.setdefault(entry.path, {}).setdefault(entry.index, (rank, entry))
    rows = []
    for path in sorted(found):
        holders = [found[path][index] for index in sorted(found[path])]
        entry = holders[0][1]
        rows.append(
            PerRankRows(
                path,
                entry.axis,
                entry.count,
                tuple(rank for rank, _ in holders),
                tuple(each.length for _, each in holders),
            )
        )
    return tuple(rows)


def _check_per_rank(arrivals: Sequence[Arrival]) -> None:
    found: dict[str, dict[int, tuple[int, PerRankArrival]]] = {}
    for rank, arrival in enumerate(arrivals):
        for entry in arrival.per_rank:
            rows = found.setdefault(entry.path, {})
            for other_rank, other in rows.values():
                if (other.axis, other.count) != (entry.axis, entry.count):
                    raise StateError(
                        f"{entry.path}: rank {other_rank} keys this per-rank value by axis "
                        f"{other.axis!r} of size {other.count}, rank {rank} by {entry.axis!r} of "
                        f"size {entry.count}; give every rank the same axis"
                    )
                break
            if entry.index in rows:
                other_rank, other = rows[entry.index]
                if (other.digest, other.length) != (entry.digest, entry.length):
                    raise StateError(
                        f"{entry.path}: ranks {other_rank} and {rank} both have index "
                        f"{entry.index} on axis {entry.axis!r}, but their values differ; key the "
                        "value by an axis on which they have different indices"
                    )
            else:
                rows[entry.index] = (rank, entry)
    for path, rows in found.items():
        count = next(iter(rows.values()))[1].count
        absent = sorted(set(range(count)) - set(rows))
        if absent:
            raise StateError(
                f"{path}: no rank holds index {', '.join(map(str, absent[:8]))} of the {count} "
                "of its axis; every index needs a rank in the process group"
            )


def compare_replicas(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse replicas that differ.

    `digests` maps a rank to its digests by fragment name; ranks that agree with one of them in
    everything are left out. Raises StateError, naming the path and two ranks.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, held in digests.items():
        for name, value in held.items():
            other_rank, other = first.setdefault(name, (rank, value))
            if other != value:
                path = name.split("\0")[0]
                raise StateError(
                    f"{path}: ranks {other_rank} and {rank} hold different values of what ought "
                    "to be one tensor; if each rank has a part of it, pass spec= "
                    "(docs/specification.md) or make it a DTensor, give tensors that are not one "
                    "names of their own, wrap it in ucpstore.PerRank if each rank has its own, or "
                    "pass check_replicas='never' if it does not matter whose parts are kept"
                )
