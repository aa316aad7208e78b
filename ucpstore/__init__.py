"""A checkpoint store for distributed training: save under any parallelism, load under any other.

    import ucpstore

    ucpstore.save("s3://bucket/run", {"model": model, "optim": optim}, step=100)
    ucpstore.load("s3://bucket/run", {"model": model, "optim": optim})

Every parameter and every optimizer state is one chunked Zarr v3 array, whatever the arrangement of
the ranks that wrote it. See `CheckpointStore` for everything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucpstore.errors import (
        AgreementError,
        CorruptError,
        FormatError,
        InProgressError,
        MismatchError,
        OutcomeUnknownError,
        RankMissingError,
        StateError,
        StepExistsError,
        StepNotFoundError,
        StorageError,
        UcpstoreError,
        UnsupportedError,
    )
    from ucpstore.flat import Flat, FlatOptimizer
    from ucpstore.loading import LoadReport
    from ucpstore.manage.open import Checkpoint
    from ucpstore.options import Options
    from ucpstore.perrank import PerRank
    from ucpstore.progress import ProgressEvent
    from ucpstore.saving import SaveHandle, SaveReport
    from ucpstore.spec import Spec
    from ucpstore.store import CheckpointStore, load, save

__version__ = "0.1.0.dev0"

__all__ = [
    "AgreementError",
    "Checkpoint",
    "CheckpointStore",
    "CorruptError",
    "Flat",
    "FlatOptimizer",
    "FormatError",
    "InProgressError",
    "LoadReport",
    "MismatchError",
    "Options",
    "OutcomeUnknownError",
    "PerRank",
    "ProgressEvent",
    "RankMissingError",
    "SaveHandle",
    "SaveReport",
    "Spec",
    "StateError",
    "StepExistsError",
    "StepNotFoundError",
    "StorageError",
    "UcpstoreError",
    "UnsupportedError",
    "load",
    "save",
]

_HOMES = {
    "Checkpoint": "ucpstore.manage.open",
    "CheckpointStore": "ucpstore.store",
    "Flat": "ucpstore.flat",
    "FlatOptimizer": "ucpstore.flat",
    "LoadReport": "ucpstore.loading",
    "Options": "ucpstore.options",
    "PerRank": "ucpstore.perrank",
    "ProgressEvent": "ucpstore.progress",
    "SaveHandle": "ucpstore.saving",
    "SaveReport": "ucpstore.saving",
    "Spec": "ucpstore.spec",
    "load": "ucpstore.store",
    "save": "ucpstore.store",
}


def __getattr__(name: str) -> object:
    # Nothing is imported before it is used: the package is also loaded by plain Zarr readers, for
    # its data types, and by the command line, which does not need torch to list a store.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "ucpstore.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
