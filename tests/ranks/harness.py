"""Real ranks for tests: pools of processes that share a gloo process group and run functions.

    def add(number):
        return dist.get_rank() + number

    def test_add(ranks):
        assert ranks.run(4, add, 10) == [10, 11, 12, 13]

Functions are sent by name and must lie in a module; arguments and results are pickled. A pool
lives on for the next test of the same size, until a test fails in it; `ranks.fresh(n)` gives a
pool of its own to a test that kills ranks. `threads` runs ranks as threads of this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ranks.worker import FunctionName, Outcome, Task, main

from ucpstore.agree import Group, local_group

PRELOAD = [
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "ranks.worker",
]
START_S = 90.0


class RanksFailed(AssertionError):  # noqa: N818  # it reports failures, it is none of ours
    """A function raised, or did not return, on some ranks. `outcomes` holds what each rank did."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        parts = [f"{name} failed on {len(failed)} of {len(outcomes)} ranks"]
        for outcome in failed:
            parts.append(f"--- rank {outcome.rank}")
            parts.append("died" if outcome.died else outcome.traceback.rstrip())
        super().__init__("\n".join(parts))


class Pool:
    """`size` processes with one process group. Use it through the `ranks` fixture."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.broken = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._processes = []
        self._connections: list[multiprocessing.connection.Connection] = []
        with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=_path()):
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=main, args=(rank, size, theirs, sys.path), name=f"rank-{rank}"
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        try:
            port = self._receive(0, time.monotonic() + START_S)
            for connection in self._connections[1:]:
                connection.send(port)
            for rank in range(size):
                self._receive(rank, time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Run `function(*args)` on every rank; the results by rank. Raises `RanksFailed`."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        if not all(outcome.ok for outcome in outcomes):
            self.broken = True
            raise RanksFailed(function.__qualname__, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
    ) -> list[Outcome]:
        """The same, with errors and deaths of ranks as outcomes instead of exceptions."""
        self.start(function, *args, timeout_s=timeout_s)
        return self.join(timeout_s=timeout_s)

    def start(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> None:
        """Begin to run a function on every rank that is alive."""
        task = Task(FunctionName.of(function), args, timeout_s)
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(task)

    def join(self, *, timeout_s: float = 120.0) -> list[Outcome]:
        """What came of `start`. Ends the pool and raises where a rank takes too long."""
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for rank in range(self.size):
            try:
                received = self._receive(rank, deadline, raw=True)
                outcomes.append(pickle.loads(received))  # noqa: S301  # from our own process
            except (EOFError, ConnectionResetError):
                self.broken = True
                outcomes.append(Outcome(rank, died=True))
            except TimeoutError:
                self.broken = True
                self.close()
                raise
        return outcomes

    def kill(self, rank: int) -> None:
        """SIGKILL one rank."""
        self.broken = True
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all ranks."""
        self.broken = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=10)
            process.close()
        self._processes = []
        self._connections = []

    def _receive(self, rank: int, deadline: float, *, raw: bool = False) -> Any:
        connection = self._connections[rank]
        if not connection.poll(max(deadline - time.monotonic(), 0)):
            raise TimeoutError(f"rank {rank} of {self.size} did not answer in time")
        return connection.recv_bytes() if raw else connection.recv()


class Ranks:
    """The pools of a test session; see the module."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """Run `function(*args)` on `size` ranks; the results by rank. Raises `RanksFailed`."""
        return self.pool(size).run(function, *args, timeout_s=timeout_s)

    def outcomes(
        self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
    ) -> list[Outcome]:
        """The same, with the errors of ranks as outcomes."""
        return self.pool(size).outcomes(function, *args, timeout_s=timeout_s)

    def pool(self, size: int) -> Pool:
        """The pool of that many ranks that tests share."""
        pool = self._pools.get(size)
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = self._pools[size] = Pool(size)
        return pool

    @contextlib.contextmanager
    def fresh(self, size: int) -> Iterator[Pool]:
        """A pool of ranks that no other test uses."""
        pool = Pool(size)
        try:
            yield pool
        finally:
            pool.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def threads(
    size: int | Sequence[Group], function: Callable[[Group], Any], *, timeout_s: float = 60.0
) -> list[Outcome]:
    """Run `function(group)` in one thread per rank of a local group; what each made of it.

    Given groups instead of a number, those are used, so that several calls share their store.
    """
    groups = local_group(size) if isinstance(size, int) else size
    outcomes = [Outcome(group.rank, died=True) for group in groups]

    def one(index: int, group: Group) -> None:
        try:
            outcomes[index] = Outcome(group.rank, function(group))
        except BaseException as error:
            outcomes[index] = Outcome(group.rank, None, error, traceback.format_exc())

    running = [
        threading.Thread(target=one, args=(index, group), daemon=True, name=f"rank-{group.rank}")
        for index, group in enumerate(groups)
    ]
    for thread in running:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in running:
        thread.join(max(deadline - time.monotonic(), 0))
    if any(thread.is_alive() for thread in running):
        raise TimeoutError(f"threads still running after {timeout_s:g} s: {outcomes}")
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values of all ranks; raises `RanksFailed` where one has none."""
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed("the function", outcomes)
    return [outcome.value for outcome in outcomes]


def _path() -> str:
    return os.pathsep.join(entry for entry in sys.path if entry)


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
