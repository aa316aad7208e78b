"""Names that only the target has, or only the checkpoint: what is told of them, and to whom."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from ucpstore.describe.kinds import array_path
from ucpstore.describe.place import Place
from ucpstore.describe.reads.differences import Differences
from ucpstore.tree.nodes import Node

_PREFIXES = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def compare_names(
    target: Mapping[object, object],
    saved: Mapping[object, Node],
    place: Place,
    differences: Differences,
) -> None:
    """Add the names of one side only to `differences`, of the dicts at a place."""
    if target.keys() == saved.keys():
        return
    missing = [key for key in target if key not in saved]
    # A second name of an array that is loaded leaves nothing out.
    loaded = {array_path(saved[key]) for key in target if key in saved} - {None}
    unexpected = [
        key for key in saved if key not in target and array_path(saved[key]) not in loaded
    ]
    differences.missing += [place.child(key, target).shown for key in missing]
    differences.unexpected += [place.child(key, saved).shown for key in unexpected]
    hint = _prefix_hint(
        {str(key) for key in missing}, {str(key) for key in unexpected}, place.shown
    )
    if hint:
        differences.hints.append(hint)


def warn_unmatched(
    unmatched: Mapping[str, Sequence[str]], items: Collection[str], skipped: Collection[str]
) -> None:
    """Say, where a load is not strict, that it has nothing to load where something is meant."""
    for item, missing in unmatched.items():
        if missing:
            text = f"none of its {len(missing)} names is in the checkpoint, such as {missing[0]}"
        else:
            text = f"the checkpoint has the items {', '.join((*items, *skipped)) or 'of nothing'}"
        warnings.warn(
            f"{item}: strict=False, and nothing of it is loaded: {text}; is this the right "
            "checkpoint, and do its names have another prefix?",
            stacklevel=3,
        )


def settle_unexpected(
    ranks: Iterable[tuple[Collection[str], Collection[str]]],
) -> tuple[str, ...]:
    """Names that no rank of a process group has a place for, of each rank's (items, unexpected).

    Ranks may hold different parts of an item, as pipeline stages do: what one of them has a place
    for is expected on all. A rank whose target leaves the item out does not count.
    """
    reports = [(frozenset(items), frozenset(names)) for items, names in ranks]
    everywhere = []
    for name in sorted(frozenset().union(*(names for _, names in reports))):
        selecting = [
            names
            for items, names in reports
            if any(name == item or name.startswith(f"{item}.") for item in items)
        ]
        if all(name in names for names in selecting):
            everywhere.append(name)
    return tuple(everywhere)


def refuse_unexpected(names: Sequence[str]) -> None:
    """Raise the error of a strict load for names that no target has a place for, if any."""
    if names:
        Differences(unexpected=list(names)).refuse(strict=True, alone=True)


def _prefix_hint(missing: Collection[str], unexpected: Collection[str], shown: str) -> str | None:
    """What to say where names differ only by the prefixes that wrappers add, nested ones too."""
    stored = {_bare(name): name for name in unexpected}
    for name in missing:
        other = stored.get(_bare(name))
        if other is not None:
            ours, theirs = name.split("."), other.split(".")
            added = [repr(f"{p}.") for p in _PREFIXES if ours.count(p) != theirs.count(p)]
            return (
                f"{shown}: names differ by {' and '.join(added) or 'the order'} of the prefixes "
                "that wrappers (DistributedDataParallel, torch.compile) add in a state_dict: the "
                f"target has {name!r}, the checkpoint {other!r}; pass the module itself instead "
                "of its state_dict(), wrappers are seen through"
            )
    return None


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)
