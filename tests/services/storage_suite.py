"""What every storage must do: derive a test class and give it a `storage` fixture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from ucpstore.errors import CorruptError
from ucpstore.storage import Storage, read_into

AWKWARD = (
    "with space",
    " leading and trailing ",
    "a%2Fb",
    "%",
    "%41",
    "a+b",
    "a&b=c?d#e",
    "~[x]{y}*|^",
    "quote'\"quote",
    "naïve-é-日本",
    ".hidden",
    ".tmp-parameter",
    "...",
    "layers.0.wq.weight",
    "x" * 200,
)


def read(storage: Storage, key: str, start: int, count: int) -> bytes:
    out = bytearray(count)
    read_into(storage, key, start, memoryview(out))
    return bytes(out)


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return sorted(entry.key for entry in storage.list(prefix))


class StorageSuite:
    """The contract of `Storage`, tried on an empty one."""

    large_bytes = 20 * 1024 * 1024
    keeps_folders = False  # whether a folder may stay for a while when its last object has gone

    def test_get_returns_what_was_put(self, storage: Storage) -> None:
        storage.put("a/b/c", b"hello")
        assert storage.get("a/b/c") == b"hello"
        assert storage.size("a/b/c") == 5

    @pytest.mark.parametrize(
        "wrap",
        [
            bytes,
            bytearray,
            memoryview,
            lambda data: np.frombuffer(data, np.uint8),
            lambda data: np.frombuffer(data, np.uint8).copy(),
            lambda data: np.frombuffer(data + data, np.uint8)[: len(data)].reshape(2, 3),
        ],
    )
    def test_put_takes_any_bytes(self, storage: Storage, wrap: Callable[[bytes], object]) -> None:
        storage.put("k", wrap(b"abcdef"))  # type: ignore[arg-type]
        assert storage.get("k") == b"abcdef"

    def test_put_replaces(self, storage: Storage) -> None:
        storage.put("k", b"a longer first value")
        storage.put("k", b"second")
        assert storage.get("k") == b"second"

    def test_put_does_not_keep_the_callers_buffer(self, storage: Storage) -> None:
        buffer = bytearray(b"before")
        storage.put("k", buffer)
        buffer[:] = b"after!"
        assert storage.get("k") == b"before"

    def test_empty_object(self, storage: Storage) -> None:
        storage.put("empty", b"")
        storage.put("empty-array", np.empty((0, 3), np.uint8))
        assert storage.get("empty") == storage.get("empty-array") == b""
        assert storage.size("empty") == 0
        assert read(storage, "empty", 0, 0) == b""
        assert keys(storage) == ["empty", "empty-array"]

    def test_large_object(self, storage: Storage) -> None:
        data = np.random.default_rng(1).integers(0, 256, self.large_bytes, np.uint8)
        storage.put("large", data)
        assert storage.size("large") == self.large_bytes
        assert read(storage, "large", self.large_bytes - 7, 7) == data[-7:].tobytes()
        out = np.empty_like(data)
        read_into(storage, "large", 0, memoryview(out))
        assert np.array_equal(out, data)

    def test_read_into_reads_a_range(self, storage: Storage) -> None:
        storage.put("k", b"0123456789")
        assert read(storage, "k", 0, 3) == b"012"
        assert read(storage, "k", 7, 3) == b"789"
        out = np.zeros((2, 2), np.uint8)
        read_into(storage, "k", 4, memoryview(out))
        assert out.tobytes() == b"4567"

    @pytest.mark.parametrize(("start", "found"), [(8, 2), (10, 0), (500, 0)])
    def test_read_into_past_the_end_is_corrupt(
        self, storage: Storage, start: int, found: int
    ) -> None:
        storage.put("some/key", b"0123456789")
        with pytest.raises(CorruptError, match=f"some/key is too short.*4 bytes.*found {found}"):
            read(storage, "some/key", start, 4)

    def test_absent_objects(self, storage: Storage) -> None:
        storage.put("folder/object", b"x")
        for absent in ("nope", "folder/nope", "folder", "folder/object/below"):
            for call in (
                lambda key: storage.get(key),
                lambda key: storage.size(key),
                lambda key: read(storage, key, 0, 1),
                lambda key: read(storage, key, 0, 0),
                lambda key: storage.copy(key, "target"),
                lambda key: storage.copy(key, key),
            ):
                with pytest.raises(FileNotFoundError) as caught:
                    call(absent)
                assert type(caught.value) is FileNotFoundError
        assert keys(storage) == ["folder/object"]

    def test_list(self, storage: Storage) -> None:
        assert keys(storage) == keys(storage, "a/") == []
        for key in ("a/1", "a/b/2", "a/b/c/3", "ab/4", "5"):
            storage.put(key, key.encode())
        assert keys(storage, "a/") == ["a/1", "a/b/2", "a/b/c/3"]
        assert keys(storage, "a/b/") == ["a/b/2", "a/b/c/3"]
        assert keys(storage) == ["5", "a/1", "a/b/2", "a/b/c/3", "ab/4"]
        assert keys(storage, "absent/") == keys(storage, "5/") == []
        entry = next(iter(storage.list("a/b/c/")))
        assert (entry.key, entry.size) == ("a/b/c/3", 7)
        assert entry.modified == pytest.approx(time.time(), abs=60)

    def test_folders(self, storage: Storage) -> None:
        assert storage.folders("") == storage.folders("a/") == ()
        for key in ("a/1", "a/b/2", "a/c/d/3", "ab/4", "5"):
            storage.put(key, b"")
        assert storage.folders("") == ("a", "ab")
        assert storage.folders("a/") == ("b", "c")
        assert storage.folders("a/b/") == storage.folders("nope/") == ()

    def test_list_many(self, storage: Storage) -> None:
        """More than one page of an S3 listing."""
        names = [f"many/{i:04}" for i in range(1100)]
        with_threads(8, lambda me: [storage.put(name, b"") for name in names[me::8]])
        assert keys(storage, "many/") == names
        storage.delete(names[:1050])
        assert keys(storage, "many/") == names[1050:]
        storage.delete_tree("many/")
        assert keys(storage, "many/") == []

    def test_awkward_keys(self, storage: Storage) -> None:
        """Keys are literal, as folders and as names."""
        wanted = [f"keys/{name}" for name in AWKWARD] + [f"{name}/zarr.json" for name in AWKWARD]
        for key in wanted:
            storage.put(key, key.encode())
        assert keys(storage) == sorted(wanted)
        for key in wanted:
            assert storage.get(key) == key.encode()
            assert storage.size(key) == len(key.encode())
        for name in AWKWARD:
            assert keys(storage, f"{name}/") == [f"{name}/zarr.json"]
            storage.copy(f"{name}/zarr.json", f"copies/{name}")
            assert storage.get(f"copies/{name}") == f"{name}/zarr.json".encode()
            storage.delete([f"{name}/zarr.json"])
        assert keys(storage) == sorted(
            [f"keys/{name}" for name in AWKWARD] + [f"copies/{name}" for name in AWKWARD]
        )

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0b"])
    def test_what_is_no_key_is_refused(self, storage: Storage, key: str) -> None:
        for call in (
            lambda: storage.put(key, b""),
            lambda: storage.put_if_absent(key, b""),
            lambda: storage.get(key),
            lambda: storage.delete([key]),
        ):
            with pytest.raises(ValueError, match="is not a key"):
                call()

    def test_a_prefix_ends_with_a_slash(self, storage: Storage) -> None:
        with pytest.raises(ValueError, match="must end with '/'"):
            list(storage.list("a"))
        with pytest.raises(ValueError, match="the whole storage"):
            storage.delete_tree("")

    def test_put_if_absent(self, storage: Storage) -> None:
        storage.put_if_absent("commits/1/zarr.json", b"first")
        with pytest.raises(FileExistsError) as caught:
            storage.put_if_absent("commits/1/zarr.json", b"second")
        assert type(caught.value) is FileExistsError
        assert storage.get("commits/1/zarr.json") == b"first"
        storage.delete(["commits/1/zarr.json"])
        storage.put_if_absent("commits/1/zarr.json", b"third")
        assert storage.get("commits/1/zarr.json") == b"third"
        assert keys(storage) == ["commits/1/zarr.json"]

    def test_put_if_absent_has_one_winner(self, storage: Storage) -> None:
        for race in range(5):
            won: list[int] = []

            def write(me: int, race: int = race, won: list[int] = won) -> None:
                try:
                    storage.put_if_absent(f"race/{race}", f"{me}".encode())
                except FileExistsError:
                    return
                won.append(me)

            with_threads(8, write)
            assert len(won) == 1
            assert storage.get(f"race/{race}") == f"{won[0]}".encode()
        assert len(keys(storage)) == 5

    def test_delete(self, storage: Storage) -> None:
        for key in ("a/1", "a/2", "b/3"):
            storage.put(key, b"")
        storage.delete(["a/1", "absent", "a/absent", "b/3/below"])
        assert keys(storage) == ["a/2", "b/3"]
        storage.delete(iter(["a/2", "b/3"]))
        storage.delete([])
        assert keys(storage) == []
        storage.put("a/1", b"again")
        assert storage.get("a/1") == b"again"

    def test_delete_tree(self, storage: Storage) -> None:
        for key in ("a/1", "a/b/2", "a/b/c/3", "ab/4"):
            storage.put(key, b"")
        storage.delete_tree("a/")
        storage.delete_tree("absent/")
        assert keys(storage) == ["ab/4"]
        assert self.keeps_folders or storage.folders("") == ("ab",)
        storage.put("a/b/c/3", b"again")
        assert storage.get("a/b/c/3") == b"again"

    def test_copy(self, storage: Storage) -> None:
        storage.put("a/1", b"one")
        storage.put("a/empty", b"")
        storage.copy("a/1", "b/c/2")
        storage.copy("a/empty", "b/c/3")
        storage.copy("a/1", "a/1")
        assert storage.get("b/c/2") == storage.get("a/1") == b"one"
        assert storage.get("b/c/3") == b""
        storage.put("a/1", b"changed")
        assert storage.get("b/c/2") == b"one"

    def test_many_threads(self, storage: Storage) -> None:
        def work(me: int) -> None:
            for i in range(8):
                key = f"threads/{i}/{me}"
                storage.put(key, key.encode() * 100)
                assert storage.get(key) == key.encode() * 100
                if i % 2:
                    storage.delete([key])
            storage.sync("threads/")

        with_threads(8, work)
        assert keys(storage) == sorted(
            f"threads/{i}/{me}" for i in range(0, 8, 2) for me in range(8)
        )

    def test_writable(self, storage: Storage) -> None:
        storage.check_writable()
        storage.check_writable()
        assert keys(storage) == []
        storage.sync("")
        storage.close()
        storage.close()

    def test_case_matters(self, storage: Storage) -> None:
        assert storage.case_insensitive is False
        storage.put("a/Key", b"1")
        storage.put("a/key", b"2")
        assert storage.get("a/Key") == b"1"


def with_threads(count: int, work: Callable[[int], object]) -> None:
    """Run `work(0)` to `work(count - 1)` at once; the first error is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(me: int) -> None:
        try:
            barrier.wait()
            work(me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
