"""Write the golden store of the format version of this source: `python tests/golden/make.py`.

A store that a release has written is never written again: a new version gets a folder of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.states import state

import ucpstore
from ucpstore.format.record import FORMAT_VERSION

if __name__ == "__main__":
    folder = Path(__file__).parent / f"format-{FORMAT_VERSION}"
    ucpstore.save(folder, state(), step=100, metadata={"note": "golden"}, overwrite=True)
