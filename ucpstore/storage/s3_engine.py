"""The compiled part of obstore, in a form that survives fork.

obstore runs its requests on threads that it starts once per process and keeps for ever. A forked
child has none of them, and its first request would wait without end (obstore 0.12). The state
belongs to the loaded library, so a child whose parent has used it loads the library a second time,
from a copy that the dynamic linker takes for another file; this costs 16 ms and 15 MiB.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from types import ModuleType

from ucpstore.errors import StorageError

_engine: ModuleType | None = None
_forked = False


def engine() -> ModuleType:
    """The module with obstore's functions, `_store` and `exceptions`, for this process."""
    global _engine
    if _engine is None:
        from obstore import _obstore

        _engine = _second_copy(_obstore) if _forked else _obstore
    return _engine


def _forget() -> None:
    global _engine, _forked
    if _engine is not None:
        _engine, _forked = None, True


os.register_at_fork(after_in_child=_forget)


def _second_copy(original: ModuleType) -> ModuleType:
    if not hasattr(os, "memfd_create"):
        raise StorageError(
            "this process was forked from one that had used S3, which does not work on this "
            "system; start processes with the spawn method"
        )
    descriptor = os.memfd_create("obstore")
    try:
        with (
            open(str(original.__file__), "rb") as library,  # noqa: PTH123
            open(descriptor, "wb", closefd=False) as copy,
        ):
            while block := library.read(1 << 20):
                copy.write(block)
        loader = importlib.machinery.ExtensionFileLoader("_obstore", f"/proc/self/fd/{descriptor}")
        spec = importlib.util.spec_from_loader("_obstore", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    finally:
        os.close(descriptor)
    return module
