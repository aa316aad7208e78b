"""How messages name ranks."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 5-9`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [_run_text(first, last) for first, last in runs]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if one else 's'} {', '.join(words)}"


def _run_text(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}-{last}"
