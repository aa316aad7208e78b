"""The load side: a target state against a stored tree.

Everything is checked before anything changes: the walk only collects reads, differences and what
to do at the end. Tensors are read in place; Python values, optimizer states and objects are put
in place by `Target.finish`, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ucpstore.describe.kinds import children
from ucpstore.describe.load.names import warn_unmatched
from ucpstore.describe.load.prepared import PreparedOptimizers
from ucpstore.describe.load.schedulers import check_schedulers
from ucpstore.describe.load.walk import TargetWalk, slot
from ucpstore.describe.modules.named import modules_of
from ucpstore.describe.place import ROOT
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.reads.casts import Cast
from ucpstore.describe.reads.differences import Differences
from ucpstore.describe.reads.read import ArrayInfo, Read
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.values.counters import Counters
from ucpstore.errors import StateError
from ucpstore.spec import Spec
from ucpstore.tree.nodes import Node


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A checked target. Nothing in it has changed yet.

    Carry out `reads` in any order, then call `finish` once. `items` are the names of the items
    that are loaded, `skipped` of those that the target leaves out. `missing` and `unexpected` are
    names, joined with dots, that only the target, or only the checkpoint has: where the process
    group has several ranks, `unexpected` may be filled in a strict load too, since other ranks may
    have the rest; see `settle_unexpected`.
    """

    reads: tuple[Read, ...]
    items: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    finish: Callable[[], None]


def match(
    state: object,
    tree: Node,
    arrays: Mapping[str, ArrayInfo],
    *,
    strict: bool = True,
    cast: Cast = None,
    group_ranks: Mapping[int, int],
    rank: int | None = None,
    spec: Spec | None = None,
) -> Target:
    """Check a target against the tree and arrays of a step; no communication, nothing changes.

    `arrays` are those of at least the items that the target names. `cast` are name patterns
    (`model.*`) of tensors whose stored dtype may differ from the target's. `group_ranks`,
    `rank` and `spec` are as in `describe`. Raises one MismatchError (UnsupportedError where nothing
    else is wrong) that lists all differences.
    """
    if not isinstance(state, dict):
        raise StateError(
            f"the target must be a dict of items, but it is a {type(state).__name__}; "
            "e.g. {'model': model, 'optim': optimizer}"
        )
    ranks = Ranks.here(group_ranks, rank, spec)
    patterns = (cast,) if isinstance(cast, str) else tuple(cast or ())
    differences = Differences()
    reads = Reads(ranks, arrays, patterns, differences)
    prepared = PreparedOptimizers(modules_of(state, ranks), reads, tree)
    prepared.find(state)
    walk = TargetWalk(reads, prepared)
    items, skipped, unmatched = _match_items(state, children(tree), walk)
    check_schedulers(walk.optimizers, walk.objects, differences)
    reads.refuse_overlaps()
    differences.refuse(strict=strict, alone=ranks.count == 1)
    if unmatched:
        warn_unmatched(unmatched, items, skipped)
    return Target(
        tuple(reads.found),
        items,
        skipped,
        (*differences.missing, *differences.kept),
        tuple(differences.unexpected),
        walk.finish,
    )


def _match_items(
    state: dict[object, object], saved: Mapping[object, Node], walk: TargetWalk
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Sequence[str]]]:
    """Walk the items that the target names; (names loaded, names left out, those unmatched).

    The latter are items of which nothing is loaded though they were saved, with the names that are
    missing.
    """
    differences = walk.reads.differences
    unmatched: dict[str, Sequence[str]] = {}
    for key, value in state.items():
        place = ROOT.child(key, state)
        if key in saved:
            known, found = len(differences.missing), walk.found
            walk.value(value, saved[key], place, slot(state, key))
            missing = differences.missing[known:]
            if missing and walk.found == found:
                unmatched[place.shown] = missing
        elif not isinstance(value, Counters):
            differences.missing.append(place.shown)
            differences.attempt(walk.prepared.absent, value, place)
    if differences.missing and not saved.keys() >= state.keys():
        there = ", ".join(map(str, saved)) or "of an empty state"
        differences.hints.append(
            f"the checkpoint has the items {there}; leave out of the target what it lacks, or "
            "pass strict=False to load what both have"
        )
    if differences.missing and not saved.keys() & state.keys():
        unmatched.update({str(key): () for key in state})
    loaded = tuple(str(key) for key in state if key in saved)
    return loaded, tuple(str(key) for key in saved if key not in state), unmatched
