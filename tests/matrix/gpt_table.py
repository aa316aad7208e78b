"""What `python tests/matrix/gpt.py` found, as text: a file, and a table in the docs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from matrix.gpt_job import MORE, SAVED, Pair

RESULTS = Path(__file__).with_name("gpt.md")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- python tests/matrix/gpt.py -->\n", "<!-- until here -->\n"

HEADER = f"""# The GPT of the example under other arrangements

`python tests/matrix/gpt.py` writes this. Of each pair the first arrangement saves step {SAVED}.

- Bits: parameters (bfloat16), masters and moments (float32) after the second arrangement has loaded
  and saved them: arrays of both checkpoints, and all ranks of the first, which loads them back.
- Losses: {MORE} more steps in float32 under the second arrangement, against the first going on.

| experts | from | to | arrays | bits | largest relative difference of a loss | |
|---|---|---|---|---|---|---|
"""
DOCS_HEADER = """
| experts | one arrangement | the other | bits | losses from the one to the other | and back |
|---|---|---|---|---|---|
"""


def line_of(pair: Pair) -> str:
    """One line of the file."""
    bits = "equal" if not pair.wrong else f"{len(pair.wrong)} differ: {pair.wrong[0]}"
    passed = "passed" if pair.passed else "FAILED"
    cells = (
        str(pair.experts or "none"),
        pair.source,
        pair.target,
        str(pair.arrays),
        bits,
        f"{pair.difference:.1e}",
        passed,
    )
    return f"| {' | '.join(cells)} |"


def results(pairs: Iterable[Pair]) -> str:
    """The whole file."""
    return HEADER + "".join(f"{line_of(pair)}\n" for pair in pairs)


def cells_of(text: str) -> Iterator[list[str]]:
    """The cells of each line of a file."""
    for line in text.removeprefix(HEADER).splitlines():
        yield [cell.strip() for cell in line.strip("|").split("|")]


def docs_table(text: str) -> str:
    """The table of the docs from the text of the file: there and back on one line."""
    found = {(experts, one, other): rest for experts, one, other, *rest in cells_of(text)}
    lines = []
    while found:
        (experts, one, other), there = next(iter(found.items()))
        del found[experts, one, other]
        back = there if one == other else found.pop((experts, other, one))
        bits = sorted({way[1] for way in (there, back)})
        shown = [way[2] if way[3] == "passed" else f"{way[2]} FAILED" for way in (there, back)]
        lines.append(f"| {' | '.join([experts, one, other, '; '.join(bits), *shown])} |\n")
    return DOCS_HEADER + "".join(lines) + "\n"


def with_table(docs: str, text: str) -> str:
    """The page of the docs with its table made anew."""
    before, rest = docs.split(BEGIN)
    _, behind = rest.split(END)
    return before + BEGIN + docs_table(text) + END + behind
