"""The example runs as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reshape_gpt.py"


@pytest.mark.parametrize(
    ("first", "second"), [("tp2,pp2", "dp2,zero3"), ("dp2,ep2,zero1", "tp2,dp2,ep2")]
)
def test_the_second_arrangement_continues_the_first(
    tmp_path: Path, first: str, second: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--from", first, "--to", second, "--steps", "8"],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +\S+$", done.stdout, re.M)
    assert [row[0] for row in rows] == ["5", "6", "7", "8"]
    assert 3.5 < float(rows[-1][1]) < 4.5  # it trains: the loss of guessing is log(97) = 4.57
    [worst] = re.findall(r"largest relative difference (\S+)", done.stdout)
    assert float(worst) <= 1e-5
    assert (tmp_path / "build" / "reshape").is_dir()
