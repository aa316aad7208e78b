"""What `verify` prints: problems and one line that sums up for people, or one JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from ucpstore.cli import text
from ucpstore.manage.verify import VerifyReport
from ucpstore.units import size

MOST_PROBLEMS = 100
"""Problems that are printed; `--json` has all."""


def page(found: VerifyReport, seconds: float) -> Iterator[str]:
    """The lines for people."""
    for problem in found.problems[:MOST_PROBLEMS]:
        yield f"{text.printable(problem.key)}: {text.printable(problem.what)}"
    if len(found.problems) > MOST_PROBLEMS:
        yield f"... and {len(found.problems) - MOST_PROBLEMS} more; --json lists all"
    for step in found.too_new:
        yield f"{step.key}: not checked: {text.printable(step.what)}"
    looked_at = ", ".join(
        (
            text.counted(len(found.steps), "step"),
            text.counted(found.documents, "document"),
            text.counted(found.arrays, "array"),
            text.counted(found.objects, "object"),
        )
    )
    if found.data:
        depth = f"{size(found.bytes_read)} read in {seconds:.2f} s"
    else:
        depth = f"{size(found.bytes)} by presence and size; --data reads them"
    verdict = text.counted(len(found.problems), "problem") if found.problems else "no problem"
    yield f"{verdict} in {looked_at} ({depth})"


def document(found: VerifyReport, seconds: float) -> dict[str, object]:
    """The JSON document."""
    return {"ok": found.ok, **asdict(found), "seconds": round(seconds, 3)}
