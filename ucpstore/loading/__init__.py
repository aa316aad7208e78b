"""Loading: resolve a step, check the whole target, read what it touches."""

from ucpstore.loading.load import LoadRequest, load_state
from ucpstore.loading.report import LoadReport

__all__ = ["LoadReport", "LoadRequest", "load_state"]
