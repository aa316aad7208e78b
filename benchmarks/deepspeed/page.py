"""The figures in docs/deepspeed.md, from the raw rounds."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.compare.ranks import Row
from benchmarks.compare.report import table

OURS, THEIRS = "ucpstore", "DeepSpeed"
PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
BEGIN = "<!-- from here written by python -m benchmarks.deepspeed page -->"
END = "<!-- to here -->"


def write_page(results: Path) -> None:
    """Put the sections of all results in the place of the old ones."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{sections(results)}\n{END}{tail}")


def sections(results: Path) -> str:
    """Of every stage that has been measured, what a person has written about it below."""
    parts = []
    for path in sorted(results.glob("deepspeed-zero*.json")):
        parts.append(section(json.loads(path.read_text())))
        notes = path.with_suffix(".md")
        if notes.exists():
            parts.append(notes.read_text())
    return "\n".join(parts)


def section(found: dict[str, object]) -> str:
    """The figures of one stage."""
    rows: list[Row] = found["rows"]  # type: ignore[assignment]
    parts = _parts(rows)[THEIRS]
    middle = {action: median(rounds.values()) for action, rounds in parts.items()}
    return (
        f"### ZeRO-{found['stage']}\n\n"
        f"{found['savers']} ranks save, {found['loaders']} load, on {found['cores']} cores; "
        f"{found['rounds']} rounds, DeepSpeed {found['deepspeed']}, torch {found['torch']}, "
        f"ucpstore {found['ucpstore']}, {found['date']}.\n\n"
        f"{table_of(rows, int(str(found['loaders'])))}\n\n"
        f"Of DeepSpeed's seconds (medians) {middle['save_checkpoint']:.2f} are `save_checkpoint`, "
        f"{middle['fsync']:.2f} the fsync, {middle['convert']:.2f} `ds_to_universal` and "
        f"{middle['load']:.2f} `load_checkpoint`. The start of the converter's process, "
        f"{middle['start of convert']:.2f}, is not counted.\n"
    )


def table_of(rows: list[Row], loaders: int) -> str:
    """Save, load and both by system; DeepSpeed's conversion belongs to its load."""
    size, parts = int(str(rows[0]["bytes"])), _parts(rows)
    shown: list[Row] = []
    for action, names in (
        ("save", ("save",)),
        (f"load on {loaders} ranks", ("convert", "load")),
        (f"save, load on {loaders} ranks", ("save", "convert", "load")),
    ):
        for system in (OURS, THEIRS):
            own = [parts[system][name] for name in names if name in parts[system]]
            shown += [
                {
                    "round": number,
                    "system": system,
                    "action": action,
                    "seconds": sum(each[number] for each in own),
                    "bytes": size,
                }
                for number in own[0]
            ]
    return table(shown)


def _parts(rows: list[Row]) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds by system, action and round."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        number, seconds = int(str(row["round"])), float(str(row["seconds"]))
        found[str(row["system"])][str(row["action"])][number] = seconds
    return found
