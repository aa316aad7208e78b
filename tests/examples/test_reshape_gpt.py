"""The example runs as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reshape_gpt.py"


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("first", "second"), [("tp2,pp2", "dp2,zero3"), ("dp2,ep2,zero1", "tp2,dp2,ep2")]
)
def test_the_second_arrangement_continues_the_first(
    tmp_path: Path, first: str, second: str
) -> None:
    done = run(tmp_path, "--from", first, "--to", second, "--steps", "8")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +\S+$", done.stdout, re.M)
    assert [row[0] for row in rows] == ["5", "6", "7", "8"]
    assert 3.5 < float(rows[-1][1]) < 4.5  # it trains: the loss of guessing is log(97) = 4.57
    [worst] = re.findall(r"largest relative difference (\S+)", done.stdout)
    assert float(worst) <= 1e-5
    assert (tmp_path / "build" / "reshape").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--from tp4", "argument --from: tp4: 2 heads of keys and values cannot be cut into 4"),
        ("--to dp16", "argument --to: dp16: 8 sequences of a batch cannot be cut into 16"),
        ("--to pp3", "argument --to: pp3: 4 layers cannot be cut into 3 equal parts"),
        ("--to dp4,zero4", "argument --to: 'dp4,zero4' is no arrangement; write e.g. tp2,pp2,"),
        ("--from zero3,pp2", "argument --from: pp2,zero3: ZeRO-3 and pipeline stages do not go"),
        ("--from dp2,ep2 --to dp2,zero3", "--to: dp2,zero3: ZeRO-3 and experts do not go"),
        ("--to one --experts 2", "2 experts in a layer; a token goes to 2 of at least 3"),
        ("--steps 1", "--steps must be at least 2"),
    ],
)
def test_what_cannot_run_is_refused_before_processes_start(
    tmp_path: Path, arguments: str, words: str
) -> None:
    done = run(tmp_path, *arguments.split())
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
