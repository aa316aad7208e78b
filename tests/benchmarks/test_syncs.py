from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.compare.syncs import Syncs, available, count, measure

ROOT = Path(__file__).parents[2]

LINES = """\
1 openat(AT_FDCWD</x>, "/s/steps/1/m/w/c.0", O_WRONLY|O_CREAT|O_TRUNC|O_CLOEXEC, 0777) = 5</s/c.0>
2 openat(AT_FDCWD</x>, "/s/steps/1/m/w/zarr.json", O_WRONLY|O_CREAT|O_TRUNC, 0777) = 5</s/z>
1 fsync(7</s/steps/1/m/w/c.0>) = 0
2 fsync(7</s/steps/1/m/w/zarr.json> <unfinished ...>
2 fsync(7</s/steps/1/m/w>) = 0
3 link("/s/commits/1/.tmp-0", "/s/commits/0000000001/zarr.json") = 0
3 openat(AT_FDCWD</x>, "/s/later", O_WRONLY|O_CREAT, 0777) = 5</s/later>
""".splitlines()


def test_what_is_counted() -> None:
    assert count(LINES, "/s", 2) == Syncs(2, 1, 1, 3, 0)
    assert count([*LINES[:2], *LINES[3:]], "/s", 2) == Syncs(2, 1, 1, 2, 1)
    assert count([LINES[0], LINES[2], *LINES], "/s", 2) == Syncs(2, 1, 1, 4, 0)
    with pytest.raises(ValueError, match="no commit"):
        count(LINES[:5], "/s", 2)


def test_a_file_that_is_written_again_is_not_synced_any_more() -> None:
    again = [*LINES[:5], LINES[0], LINES[5]]
    assert count(again, "/s", 2).not_synced_before_the_commit == 1


@pytest.mark.skipif(not available(), reason="strace is not installed")
def test_every_file_of_a_save_is_synced_before_its_commit() -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    found = measure(ranks=2, mib=16)
    assert found.not_synced_before_the_commit == 0
    assert found.data_files >= 3
    assert found.metadata_files > found.data_files
    assert found.fsync_calls > found.data_files + found.metadata_files
