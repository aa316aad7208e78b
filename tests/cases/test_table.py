"""The page of the field cases names tests that exist, and no case and no test is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "cases.md"
CASES = [
    *(f"B{number:02}" for number in range(2, 5)),
    *(f"B{number:02}" for number in range(6, 14)),
    *(f"B{number:02}" for number in range(15, 20)),
    *(f"B{number:02}" for number in range(21, 28)),
    *("B30", "B31", "B32", "B33"),
    *(f"B{number:02}" for number in range(35, 39)),
    *("B40", "B42", "B44", "B45", "B47", "B48", "B50", "B53", "B55", "B56"),
    *(f"B{number:02}" for number in range(59, 63)),
    "B80",
    *(f"B{number:02}" for number in range(82, 84)),
    *(f"B{number:02}" for number in range(85, 91)),
]
OUTCOMES = ("Round trip", "Refusal", "Needs a GPU")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| B")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions(folder: Path) -> dict[str, str]:
    """The decorators, as text, of every test below a folder, by name."""
    found = {}
    for path in folder.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = " ".join(ast.unparse(each) for each in node.decorator_list)
    return found


def test_every_case_has_a_row_with_an_outcome() -> None:
    assert sorted({case for case, *_ in rows()}) == sorted(CASES)
    assert [row for row in rows() if len(row) != 4 or not row[2].startswith(OUTCOMES)] == []


def test_every_row_names_tests_of_its_case() -> None:
    defined = functions(HERE.parent)
    for case, _, outcome, cell in rows():
        names = re.findall(r"`(test_\w+)`", cell)
        assert names, case
        for name in names:
            assert name in defined
            assert name.startswith(f"test_{case.lower()}_")
            assert ("mark.gpu" in defined[name]) == (outcome == "Needs a GPU")


def test_every_test_is_in_the_table() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    own = {name for name in functions(HERE) if re.match(r"test_b\d", name)}
    assert sorted(own - named) == []
