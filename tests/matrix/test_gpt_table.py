"""The committed results of the matrix on the GPT of the example, and their table in the docs."""

from __future__ import annotations

from matrix import gpt_table
from matrix.gpt_job import ROWS, Pair


def made(source: str, target: str, difference: float = 1e-7, wrong: tuple[str, ...] = ()) -> Pair:
    return Pair(0, source, target, 200, wrong, difference)


def test_a_line_of_the_docs_is_there_and_back() -> None:
    text = gpt_table.results(
        [
            made("tp2", "tp2", 0.0),
            made("tp2", "one"),
            made("tp2", "dp2", wrong=("optim/step",)),
            made("one", "tp2", 2e-7),
            made("dp2", "tp2", 1e-3),
        ]
    )
    assert gpt_table.docs_table(text) == gpt_table.DOCS_HEADER + (
        "| none | tp2 | tp2 | equal | 0.0e+00 | 0.0e+00 |\n"
        "| none | tp2 | one | equal | 1.0e-07 | 2.0e-07 |\n"
        "| none | tp2 | dp2 | 1 differ: optim/step; equal | 1.0e-07 FAILED | 1.0e-03 FAILED |\n"
        "\n"
    )
    docs = f"before\n{gpt_table.BEGIN}old\n{gpt_table.END}behind\n"
    again = gpt_table.with_table(docs, text)
    assert again.startswith(f"before\n{gpt_table.BEGIN}{gpt_table.DOCS_HEADER}| none | tp2 | tp2")
    assert again.endswith(f"FAILED |\n\n{gpt_table.END}behind\n")
    assert gpt_table.with_table(again, text) == again


def test_the_results_are_of_all_pairs_and_the_docs_agree() -> None:
    text = gpt_table.RESULTS.read_text()
    assert text.startswith(gpt_table.HEADER)
    lines = list(gpt_table.cells_of(text))
    assert [tuple(line[:3]) for line in lines] == [
        (str(row.experts or "none"), row.source, target) for row in ROWS for target in row.targets
    ]
    assert {(line[4], line[6]) for line in lines} == {("equal", "passed")}
    docs = gpt_table.DOCS.read_text()
    assert gpt_table.with_table(docs, text) == docs, "run python tests/matrix/gpt.py --docs"
