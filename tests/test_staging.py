from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from services.forking import held_by_a_thread, in_child

import ucpstore
from ucpstore.geometry import Box, Piece
from ucpstore.options import MIB
from ucpstore.staging import BufferPool, LocalWriter, parts, pool_for, read_local


def test_a_buffer_is_used_again() -> None:
    pool = BufferPool(4 * MIB)
    with pool.take(MIB) as first:
        first[:] = 7
        address = first.ctypes.data
    with pool.take(MIB - 5) as second:
        assert second.size == MIB - 5
        assert second.ctypes.data == address, "the memory that was touched before"


def test_memory_is_used_again_whatever_the_sizes() -> None:
    pool = BufferPool(4 * MIB)
    addresses = set()
    for size in (3 * MIB, 5, MIB, 4 * MIB, 4096):
        with pool.take(size) as buffer:
            addresses.add(buffer.ctypes.data)
    assert len(addresses) == 1


def test_buffers_that_are_out_do_not_overlap() -> None:
    pool = BufferPool(16 * MIB)
    random = np.random.default_rng(0)
    out: list[tuple[np.ndarray, int]] = []
    for number in range(500):
        if out and random.random() < 0.5:
            buffer, value = out.pop(int(random.integers(len(out))))
            assert (buffer[::997] == value).all()
            pool.release(buffer)
        elif sum(buffer.size for buffer, _ in out) < 6 * MIB:
            buffer = pool.acquire(int(random.integers(1, 2 * MIB)))
            buffer[:] = number % 251
            out.append((buffer, number % 251))
    for buffer, value in out:
        assert (buffer[::997] == value).all()
        pool.release(buffer)
    with pool.take(16 * MIB):
        pass


@pytest.mark.parametrize("size", [1, 4096, 5000, 1 << 20, 3 << 20])
def test_buffers_begin_in_the_middle_of_a_page(size: int) -> None:
    # Elsewhere reads from the page cache are several times slower; above the limit too.
    pool = BufferPool(2 << 20)
    with pool.take(1):
        pass
    first = pool.acquire(size)
    assert first.ctypes.data % 4096 == 2048
    if size < 1 << 20:
        with pool.take(size) as second:
            assert second.ctypes.data % 4096 == 2048


def test_no_more_than_the_limit_is_out_at_once() -> None:
    pool = BufferPool(2 * MIB)
    out, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal out, most
        with pool.take(MIB):
            with lock:
                out += 1
                most = max(most, out)
            time.sleep(0.002)
            with lock:
                out -= 1

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == 2


def test_a_buffer_above_the_limit_goes_alone() -> None:
    pool = BufferPool(MIB)
    with pool.take(3 * MIB) as large:
        assert large.size == 3 * MIB
        taken = threading.Event()

        def other() -> None:
            with pool.take(10):
                taken.set()

        thread = threading.Thread(target=other)
        thread.start()
        assert not taken.wait(0.05)
    assert taken.wait(5)
    thread.join(5)


def test_a_buffer_comes_back_after_an_error() -> None:
    pool = BufferPool(MIB)
    with pytest.raises(RuntimeError, match="stop"), pool.take(MIB):
        raise RuntimeError("stop")
    with pool.take(MIB):
        pass


def test_parts_of_pieces_in_a_region() -> None:
    pieces = (
        Piece(Box((0, 0), (2, 4)), Box((0, 0), (2, 4))),
        Piece(Box((6, 0), (2, 4)), Box((2, 0), (2, 4))),
    )
    found = list(parts(pieces, Box((1, 1), (6, 2))))
    assert found == [
        Piece(Box((1, 1), (1, 2)), Box((1, 1), (1, 2))),
        Piece(Box((6, 1), (1, 2)), Box((2, 1), (1, 2))),
    ]


def test_a_host_tensor_is_read_without_a_copy() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    view = read_local(tensor, Box((1, 1), (2, 2)))
    assert view.shape == (2, 2)
    tensor[1, 1] = -1.0
    assert view[0, 0] == np.float32(-1.0).view(np.uint32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_what_is_written_is_what_was_read(dtype: torch.dtype) -> None:
    source = torch.arange(20).reshape(4, 5).to(dtype).t()
    target = torch.zeros(5, 4, dtype=dtype)
    box = Box((1, 0), (3, 2))
    with LocalWriter([target], dtype) as writer:
        writer.put(0, box.slices(), read_local(source, box))
    assert torch.equal(target[1:4, 0:2], source[1:4, 0:2])
    assert target[0].count_nonzero() == 0


def test_values_of_another_dtype_are_converted_as_torch_does() -> None:
    source = torch.tensor([1 / 3, 1e30, -0.0])
    target = torch.zeros(3, dtype=torch.bfloat16)
    whole = Box((0,), (3,))
    with LocalWriter([target], torch.float32) as writer:
        writer.put(0, whole.slices(), read_local(source, whole))
    assert target.view(torch.int16).tolist() == source.to(torch.bfloat16).view(torch.int16).tolist()


def test_0d_tensors() -> None:
    target = torch.tensor(0.0)
    scalar = Box((), ())
    with LocalWriter([target], torch.float32) as writer:
        writer.put(0, (...,), read_local(torch.tensor(2.5), scalar))
    assert target.item() == 2.5


def test_a_forked_child_has_buffers_of_its_own() -> None:
    """Those that are out are held by threads that the child does not have."""
    limit = 1 << 20
    pool = pool_for(2 * limit)

    def check() -> None:
        with pool_for(2 * limit).take(limit) as buffer:
            assert buffer.size == limit

    with held_by_a_thread(pool.take(4096)):
        assert in_child(check) == 0
    assert pool_for(2 * limit) is pool


def test_a_budget_above_what_the_system_gives_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, asked = np.empty, []

    def short(shape: int, dtype: type) -> np.ndarray:
        asked.append(shape)
        if shape > 5 * MIB:
            raise MemoryError
        return empty(shape, dtype)

    monkeypatch.setattr("ucpstore.staging.np.empty", short)
    pool = BufferPool(1 << 70)
    with pool.take(3 * MIB) as one, pool.take(MIB) as other:
        assert (one.size, other.size, pool.limit) == (3 * MIB, MIB, 4 * MIB)
    page = 4096  # for the place where buffers begin
    assert asked == [(1 << power) + page for power in range(46, 21, -1)]


def test_a_huge_budget_needs_no_memory(tmp_path: Path) -> None:
    options = ucpstore.Options(budget_bytes=1 << 66)
    ucpstore.save(tmp_path, {"a": torch.arange(3)}, step=1, options=options)
    target = torch.zeros(3, dtype=torch.int64)
    ucpstore.load(tmp_path, {"a": target}, options=options)
    assert target.tolist() == [0, 1, 2]
