"""From raw rounds to medians, ratios and plots."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

Rows = Sequence[Mapping[str, object]]
OURS = "ucpstore"
DOCS = Path(__file__).parents[2] / "docs"

INTRODUCTION = """\
# Performance

This page is written by `python -m benchmarks.compare page` from the raw times in
[benchmarks/results](../benchmarks/results), which `python -m benchmarks.compare local` and
`python -m benchmarks.compare s3` measure. Run them on your machine: figures from another one say
little, ratios say more.

- All systems run in one job, in turn, in every round; ratios are taken round by round.
- Every save writes fresh files, as a training run does, and is timed from the call until the
  checkpoint is complete and durable (local files are synced), on the slowest rank.
- Every load is compared with what was saved.
- ucpstore runs with its default options. DCP is `torch.distributed.checkpoint` with
  `FileSystemWriter(sync_files=True)`, with one and with four threads, and with `FsspecWriter` on
  S3.
- The bare loop writes the same bytes in objects of one size, with a crc32c each, by four threads a
  rank, and does nothing else: no names, no metadata, no commit, no other arrangement. The best of
  three sizes is shown. It syncs every file by itself; *synced together* it begins to write all
  files and then syncs them, as ucpstore does. *Of chunks* it has chunks of 512 by 1024 elements, as
  arrays that can be read under another arrangement need them, and copies each into its place.
- *warm* means that the page cache holds the files, *cold* that it was dropped before.
"""

SYNCS = """\
## Synced before the commit

`python -m benchmarks.compare syncs` counts the system calls of a save by {ranks} ranks with strace:
{data_files} data files and {metadata_files} documents were written below the step, and
{fsync_calls} calls of fsync were made before the `link(2)` that commits it. Files not synced by
then: {not_synced_before_the_commit}.
"""


FLOOR = """\
`python -m benchmarks.compare floor` measures what the requests alone cost here, with bare obstore
and {ranks} ranks: {whole:.2f} s for {mib} MiB in whole objects of 4 MiB, {ranges:.2f} s for the
same bytes in ranges of one chunk of 1 MiB, {small:.2f} s for {gets} gets of 8 KiB.
"""


def seconds(rows: Rows) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds by action, system and round."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        value = float(str(row["seconds"]))
        found[str(row["action"])][str(row["system"])][int(str(row["round"]))] = value
    return found


def best_of(by_system: Mapping[str, Mapping[int, float]]) -> dict[str, Mapping[int, float]]:
    """The systems by kind, of each the one with the best median: ucpstore, DCP, bare loop."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for system in by_system:
        kinds[system.split(",")[0]].append(system)
    chosen = (
        min(names, key=lambda name: median(by_system[name].values())) for names in kinds.values()
    )
    return {name: by_system[name] for name in chosen}


def table(rows: Rows) -> str:
    """Median GB/s, and how many times as fast ucpstore is, round by round (median and range)."""
    volume = {str(row["action"]): int(str(row["bytes"])) for row in rows}
    lines = [
        "| action | system | median, s | GB/s | ucpstore is as fast, times | least to most |",
        "|---|---|---|---|---|---|",
    ]
    for action, by_system in seconds(rows).items():
        chosen = best_of(by_system)
        own = chosen[OURS]
        for system, rounds in chosen.items():
            middle = median(rounds.values())
            cells = [action, system, f"{middle:.3f}", f"{volume[action] / middle / 1e9:.2f}"]
            if system == OURS:
                cells += ["", ""]
            else:
                ratios = sorted(rounds[number] / own[number] for number in rounds)
                cells += [f"{median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Rows, path: Path, title: str) -> None:
    """Bars of GB/s by action and system, with every round as a dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    volume = {str(row["action"]): int(str(row["bytes"])) for row in rows}
    actions = {name: best_of(each) for name, each in seconds(rows).items() if name != "one slice"}
    kinds = ["ucpstore", "DCP", "bare loop"]
    colours = dict(zip(kinds, ("#1b6ca8", "#c8553d", "#9aa5b1"), strict=True))
    figure, axes = pyplot.subplots(figsize=(9, 0.75 * len(actions) + 1.2))
    for position, (action, chosen) in enumerate(actions.items()):
        for offset, kind in enumerate(kinds):
            rounds = next((r for name, r in chosen.items() if name.split(",")[0] == kind), None)
            if rounds is None:
                continue
            rates = [volume[action] / value / 1e9 for value in rounds.values()]
            y = position + (offset - 1) * 0.26
            axes.barh(y, median(rates), 0.24, color=colours[kind])
            axes.plot(rates, [y] * len(rates), ".", color="#333333", markersize=3)
    axes.set_yticks(range(len(actions)), list(actions))
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, all ranks together; bars are medians, dots are rounds")
    axes.set_title(title, loc="left")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in kinds]
    axes.legend(handles, kinds, loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def write_page(results: Path) -> None:
    """Write docs/performance.md and its plots from the results that are there."""
    parts = [INTRODUCTION]
    for what, title in (
        ("local", "Local disk"),
        ("s3", "S3 (SeaweedFS on loopback)"),
        ("small", "2,000 arrays of 4 KiB, local disk"),
    ):
        file = results / f"{what}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        plot(found["rows"], DOCS / "images" / f"performance-{what}.png", title)
        notes = results / f"{what}.md"  # what limits the figures, written by a person
        parts.append(
            f"## {title}\n\n{found['ranks']} ranks on {found['cores']} cores, {found['mib']} MiB, "
            f"{found['rounds']} rounds, torch {found['torch']}, ucpstore {found['ucpstore']}, "
            f"{found['date']}.\n\n![{title}](images/performance-{what}.png)\n\n"
            f"{table(found['rows'])}\n" + (f"\n{notes.read_text()}" if notes.exists() else "")
        )
        if what == "s3" and (results / "floor.json").exists():
            parts.append(FLOOR.format(**json.loads((results / "floor.json").read_text())))
    if (results / "syncs.json").exists():
        parts.append(SYNCS.format(**json.loads((results / "syncs.json").read_text())))
    (DOCS / "performance.md").write_text("\n".join(parts))
