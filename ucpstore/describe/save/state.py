"""The save side: from the user's state to arrays, a typed tree and per-rank documents.

Only metadata is read: no tensor is copied but for foreign byte orders, pending conjugations and
0-d values that lie in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ucpstore.describe.engines.deepspeed import expand
from ucpstore.describe.modules.named import modules_of
from ucpstore.describe.place import ROOT
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.save.arrays import LocalArray, LocalArrays
from ucpstore.describe.save.walk import SaveWalk
from ucpstore.describe.values.perrank import PerRankDocument
from ucpstore.errors import StateError
from ucpstore.spec import Spec
from ucpstore.tree.nodes import Node
from ucpstore.wrappers import is_engine


@dataclass(frozen=True, slots=True, eq=False)
class LocalState:
    """The state as this rank sees it; `arrays` and `per_rank` are sorted by path."""

    tree: Node
    arrays: tuple[LocalArray, ...]
    per_rank: tuple[PerRankDocument, ...]


def check_state(state: object) -> Mapping[str, object]:
    """The items of a state; StateError for what is no mapping of items and no engine."""
    if is_engine(state):
        return expand(state, "")
    if not isinstance(state, Mapping):
        raise StateError(
            f"state must be a dict of items, but it is a {type(state).__name__}; "
            "pass {'model': model, 'optim': optimizer} or the like"
        )
    return state


def describe(
    state: object,
    *,
    per_rank: Sequence[str] | str = (),
    cast: Sequence[tuple[str, str]] = (),
    codec_of: Callable[[str], str | None] = lambda name: None,
    group_ranks: Mapping[int, int],
    rank: int | None = None,
    spec: Spec | None = None,
) -> LocalState:
    """Describe a state; no communication, and nothing in it changes.

    `per_rank` are name patterns (`loader.*`, as in fnmatch, over names joined with dots) of values
    that differ by rank, `cast` pairs of such a pattern and the Zarr name of the dtype in which
    arrays of these names are stored (the first that matches counts). 0-d tensors that lie in the
    tree keep theirs: a `step` of 1001 would be 1000 in bfloat16. `codec_of` gives the compressor
    of the array of a name. `group_ranks` maps global ranks to ranks of the process group, `rank` is
    this process's rank in it (needed only where torch.distributed is not initialised). `spec` says
    how plain tensors lie over the ranks. Raises StateError or UnsupportedError, naming the path,
    for whatever cannot be stored.
    """
    state = check_state(state)
    patterns = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
    ranks = Ranks.here(group_ranks, rank, spec)
    arrays = LocalArrays(ranks, tuple(cast), codec_of)
    walk = SaveWalk(ranks, patterns, modules_of(dict(state), ranks), arrays)
    tree = walk.value(dict(state), ROOT)
    return LocalState(
        tree,
        tuple(arrays.found[path] for path in sorted(arrays.found)),
        tuple(sorted(walk.documents, key=lambda document: document.path)),
    )
