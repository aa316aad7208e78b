"""Saving: describe, agree, plan, write, commit."""

from ucpstore.saving.report import SaveHandle, SaveReport
from ucpstore.saving.request import SaveRequest
from ucpstore.saving.save import save_state

__all__ = ["SaveHandle", "SaveReport", "SaveRequest", "save_state"]
