"""Saving: describe, agree, plan, write, commit.

Nothing is imported before it is used: the command line looks at marks and needs no torch for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucpstore.saving.report import SaveHandle, SaveReport
    from ucpstore.saving.request import SaveRequest
    from ucpstore.saving.save import save_state

__all__ = ["SaveHandle", "SaveReport", "SaveRequest", "save_state"]

_HOMES = {
    "SaveHandle": "ucpstore.saving.report",
    "SaveReport": "ucpstore.saving.report",
    "SaveRequest": "ucpstore.saving.request",
    "save_state": "ucpstore.saving.save",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
