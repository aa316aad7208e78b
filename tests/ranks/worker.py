"""What a rank process runs: it waits for functions, runs them and sends back what came of it.

Forked from a server that has imported torch, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import importlib.util
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

GROUP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class FunctionName:
    """Where to find a function; test modules are no importable packages, hence the file."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionName:
        code = getattr(function, "__code__", None)
        if code is None or "<" in function.__qualname__:
            raise TypeError(f"ranks can run functions of a module only, not {function!r}")
        return cls(function.__module__, code.co_filename, function.__qualname__)

    def load(self) -> Callable[..., Any]:
        found: Any = _module(self.module, self.file)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]


def _module(name: str, file: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class Task:
    function: FunctionName
    args: tuple[Any, ...]
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a task: a value, or an error with its traceback, or its death."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    died: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.died


def main(rank: int, size: int, connection: Connection, sys_path: list[str]) -> None:
    """Join the process group, then run tasks until the other end closes."""
    sys.path[:] = sys_path
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("error", module=r"ucpstore(\.|$)")
    faulthandler.enable()
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    try:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
            connection.send(store.port)
        else:
            port = connection.recv()
            store = dist.TCPStore("127.0.0.1", port, size, False, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        connection.send("ready")
        while True:
            task = connection.recv()
            if task is None:
                return
            connection.send_bytes(_run(rank, task))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _run(rank: int, task: Task) -> bytes:
    faulthandler.dump_traceback_later(max(task.timeout_s - 1, 0.5))
    try:
        value = task.function.load()(*task.args)
        return pickle.dumps(Outcome(rank, value))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # written two lines above
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(Outcome(rank, None, error, text))
    finally:
        faulthandler.cancel_dump_traceback_later()
