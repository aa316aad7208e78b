"""Field cases of storage: B80 to B90: listings, loops, busy servers, credentials, URLs, limits."""

from __future__ import annotations

import asyncio
import io
import secrets
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cases.tools import attempt, same
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from services.proxy import BUSY, S3Proxy
from services.seaweed import S3Service
from services.storage_suite import with_threads

import ucpstore
from ucpstore.storage import open_storage

ENGINES = ["obstore", "s3fs"]
EXPIRED = (400, b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>")


pytestmark = pytest.mark.usefixtures("no_aws_settings")


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/{secrets.token_hex(4)}/run"


def values(seed: int, rows: int = 24) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(rows, 5, generator=draw), "b": torch.randn(7, generator=draw)}


def save(url: str, seed: int, step: int = 1, rows: int = 24, **arguments: Any) -> None:
    ucpstore.save(url, {"m": values(seed, rows), "note": seed}, step=step, **arguments)


def check(url: str, seed: int, rows: int = 24, **arguments: Any) -> None:
    """Loading gives what `save` with that seed stored."""
    target = {"m": {"w": torch.zeros(rows, 5), "b": torch.zeros(7)}, "note": None}
    ucpstore.load(url, target, **arguments)
    assert target["note"] == seed
    assert all(same(target["m"][name], value) for name, value in values(seed, rows).items())


# B80: listings that are kept.


@pytest.mark.parametrize("place", ["obstore", "s3fs", "memory", "local"])
def test_b80_what_others_saved_meanwhile_is_seen(
    request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    options: dict[str, object] = {}
    if place in ENGINES:
        service: S3Service = request.getfixturevalue("s3")
        url, options = request.getfixturevalue("url"), {"engine": place, **service.options()}
    elif place == "memory":
        url = f"memory://{tmp_path.name}"
    else:
        url = f"local://{tmp_path}/run"
    mine = ucpstore.CheckpointStore(url, options)
    save(url, 1, storage_options=options)
    assert mine.steps() == [1]
    save(url, 2, step=2, storage_options=options)
    save(url, 3, rows=48, storage_options=options, overwrite=True)
    assert (mine.steps(), mine.latest()) == ([1, 2], 2)
    target = {"m": {"w": torch.zeros(48, 5), "b": torch.zeros(7)}, "note": None}
    mine.load(target, step=1)
    assert target["note"] == 3
    assert same(target["m"]["w"], values(3, 48)["w"])
    check(url, 2, storage_options=options)


# B82: event loops and threads.


@pytest.mark.parametrize("engine", [*ENGINES, "memory"])
def test_b82_loops_and_threads_of_the_user_do_not_matter(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str
) -> None:
    options: dict[str, object] = {}
    if engine == "memory":
        url = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").ls("/")
    else:
        service: S3Service = request.getfixturevalue("s3")
        url, options = request.getfixturevalue("url"), {"engine": engine, **service.options()}
        theirs = {name: options[name] for name in ("key", "secret", "endpoint_url")}
        fsspec.filesystem("s3", **theirs).info(url.split("/")[2])

    async def inside(step: int) -> None:
        save(url, step, step=step, storage_options=options)
        check(url, step, storage_options=options)

    asyncio.run(inside(1))
    asyncio.run(inside(2))
    store = ucpstore.CheckpointStore(url, options)

    def work(me: int) -> None:
        store.save({"m": values(me), "note": me}, step=10 + me)
        check(url, me, step=10 + me, storage_options=options)

    with_threads(8, work)
    assert store.steps() == [1, 2, *range(10, 18)]

    async def later() -> None:  # as a notebook, whose loop runs for ever
        await asyncio.get_running_loop().run_in_executor(None, work, 8)
        work(9)

    asyncio.run(later())
    assert store.latest() == 19


# B83: servers that are too busy.


@pytest.mark.parametrize("engine", ENGINES)
def test_b83_a_busy_server_delays_a_save_and_a_load(
    s3: S3Service, url: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr("ucpstore.storage.s3_calls.FIRST_WAIT_S", 0.005)
    options = {"engine": engine, **s3.options(endpoint=proxy.endpoint)}
    proxy.busy_share(0.3)
    save(url, 1, storage_options=options)
    check(url, 1, storage_options=options)
    assert any(each.status == 503 for each in proxy.log)
    proxy.busy_first(6)
    save(url, 2, step=2, storage_options=options)
    check(url, 2, storage_options=options)
    puts = [each.status for each in proxy.requests("PUT", "commits/0000000002/")]
    assert puts == [503] * 6 + [200]


@pytest.mark.parametrize("engine", ENGINES)
def test_b83_a_server_that_stays_busy_fails_the_save_within_the_limit(
    s3: S3Service, url: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr("ucpstore.storage.s3_clients.RETRY_TIMEOUT_S", 1.0)
    options = {"engine": engine, **s3.options(endpoint=proxy.endpoint)}
    save(url, 1, storage_options=options)
    for part in ("steps/", "commits/0000000002"):
        proxy.answer(
            lambda method, path, part=part: BUSY if method == "PUT" and part in path else None
        )
        began = time.monotonic()
        with pytest.raises(ucpstore.StorageError, match="too busy") as caught:
            save(url, 2, step=2, storage_options=options)
        assert not isinstance(caught.value, ucpstore.OutcomeUnknownError)
        assert time.monotonic() - began < 20
        proxy.heal()
        assert ucpstore.CheckpointStore(url, options).steps() == [1]
    save(url, 2, step=2, storage_options=options)
    check(url, 2, storage_options=options)


# B85: credentials.


@pytest.mark.parametrize("engine", ENGINES)
def test_b85_a_key_that_expires_is_looked_up_again(
    s3: S3Service, url: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def use(key: str) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-it")

    admin = s3.identities["admin"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", admin[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", admin[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    store = ucpstore.CheckpointStore(url, {"engine": engine})
    real, seen = proxy._forward, [0]

    def forward(handler: Any, body: bytes) -> Any:
        """The first key is rejected after five requests; the fresh one signs for nobody else."""
        if "other-than-before" not in handler.headers["Authorization"]:
            seen[0] += 1
            if seen[0] > 5:
                return EXPIRED[0], [], EXPIRED[1]
            return real(handler, body)
        return 403, [], b"<Error><Code>AccessDenied</Code></Error>"

    monkeypatch.setattr(proxy, "_forward", forward)
    text = attempt(lambda: store.save({"m": values(1)}, step=1))
    assert "expired" in text
    assert admin[1] not in text
    use("other-than-before")
    assert "access denied" in attempt(lambda: store.save({"m": values(1)}, step=2))
    monkeypatch.setattr(proxy, "_forward", real)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", admin[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", admin[1])
    again = ucpstore.CheckpointStore(url, {"engine": engine})
    again.save({"m": values(3)}, step=3)
    assert again.steps() == [3]


@pytest.mark.parametrize("engine", ENGINES)
def test_b85_what_is_wrong_with_credentials_and_buckets_is_told_apart(
    s3: S3Service, url: str, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    right = {"engine": engine, **s3.options()}
    wrong_secret = secrets.token_hex(20)
    cases = {
        "no S3 credentials found": (url, {"engine": engine, "endpoint_url": s3.endpoint}),
        "does not know the access key": (url, {**right, "key": "AKIANOBODY"}),
        "secret does not belong to": (url, {**right, "secret": wrong_secret}),
        "does not exist": ("s3://no-such-bucket-anywhere/run", right),
    }
    for words, (place, options) in cases.items():
        began = time.monotonic()
        text = attempt(lambda place=place, options=options: save(place, 1, storage_options=options))
        assert words in text
        assert time.monotonic() - began < 30
        assert wrong_secret not in text
        assert str(right["secret"]) not in text
    with pytest.raises(ucpstore.StorageError, match="does not exist"):
        ucpstore.CheckpointStore("s3://no-such-bucket-anywhere/run", right).steps()


@pytest.mark.parametrize("engine", ENGINES)
def test_b85_no_secret_is_logged_shown_or_stored(
    s3: S3Service, url: str, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    options = {"engine": engine, **s3.options(), "token": None}
    secret = str(options["secret"])
    caplog.set_level(0)
    store = ucpstore.CheckpointStore(url, options)
    store.save({"m": values(1), "note": 1}, step=1, metadata={"by": "test"})
    check(url, 1, storage_options=options)
    storage = open_storage(url, options)
    shown = [repr(store), repr(storage), store.url, attempt(lambda: store.load({}, step=9))]
    for bad in ({**options, "secrt": secret}, {**options, "anon": True}):
        shown.append(attempt(lambda bad=bad: ucpstore.CheckpointStore(url, bad)))
    assert not any(secret in text for text in (*shown, caplog.text))
    for entry in storage.list(""):
        assert secret.encode() not in storage.get(entry.key)
        assert secret not in entry.key


# B86: any fsspec place.


class Awkward(MemoryFileSystem):
    """No descriptor, no rename, no copy, no folders; buckets are the user's business."""

    protocol = "awkward"
    store: dict[str, Any] = {}  # noqa: RUF012  # of the class, as in fsspec
    pseudo_dirs = [""]  # noqa: RUF012
    log: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("awkward://"))

    def _forbidden(self, *args: object, **kwargs: object) -> None:
        raise io.UnsupportedOperation("not here")

    mv = rename = mkdir = makedirs = cp_file = copy = touch = _forbidden

    def pipe_file(self, path: str, value: bytes, **kwargs: object) -> None:
        self.log.append(self._strip_protocol(path))
        super().pipe_file(path, value)


def no_descriptor(self: MemoryFile) -> int:
    raise io.UnsupportedOperation("fileno")


@pytest.fixture
def awkward(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("awkward", Awkward, clobber=True)
    monkeypatch.setattr(MemoryFile, "fileno", no_descriptor)
    Awkward.store.clear()
    Awkward.log.clear()
    return "awkward://bucket/run"


ONE_WRITER = "ignore:.*cannot create an object only where there is none"


@pytest.mark.filterwarnings(ONE_WRITER)
@pytest.mark.parametrize("kind", ["memory", "file", "local", "awkward"])
def test_b86_every_byte_is_there_when_save_returns(tmp_path: Path, awkward: str, kind: str) -> None:
    url = {
        "memory": f"memory://{tmp_path.name}",
        "file": f"file://{tmp_path}/run",
        "local": f"local://{tmp_path}/run",
        "awkward": awkward,
    }[kind]
    save(url, 1)
    report = ucpstore.CheckpointStore(url).open()
    found = {entry.key: entry.size for entry in open_storage(url).list("steps/")}
    objects = {key: size for key, size in found.items() if not key.endswith("zarr.json")}
    assert sorted(objects.values()) == [7 * 4 + 4, 24 * 5 * 4 + 4]  # each with its checksum
    assert torch.equal(torch.as_tensor(report["m"]["w"][...]), values(1)["w"])
    check(url, 1)


@pytest.mark.parametrize("outer", ["dir::s3://{}", "simplecache::s3://{}"])
def test_b86_chained_urls_are_read(s3: S3Service, url: str, outer: str, tmp_path: Path) -> None:
    save(url, 1, storage_options=s3.options())
    chained = outer.format(url.removeprefix("s3://"))
    options: dict[str, object] = {"s3": s3.options()}
    if outer.startswith("simplecache"):
        options["simplecache"] = {"cache_storage": str(tmp_path / "cache")}
    check(chained, 1, storage_options=options)
    check(chained, 1, storage_options=dict(s3.options()))
    with pytest.raises(ucpstore.StorageError, match="chained URLs are for reading"):
        save(chained, 2, step=2, storage_options=options)
    assert ucpstore.CheckpointStore(chained, options).steps() == [1]
    assert str(s3.options()["secret"]) not in repr(open_storage(chained, options))


# B87: no rename, no copy, no folders.


@pytest.mark.filterwarnings(ONE_WRITER)
def test_b87_a_place_without_rename_copy_and_folders(awkward: str) -> None:
    save(awkward, 1)
    check(awkward, 1)
    assert Awkward.log[-1] == "/bucket/run/commits/0000000001/zarr.json"
    assert [path for path in Awkward.log if "commits/0" in path] == [Awkward.log[-1]]


@pytest.mark.parametrize("engine", ENGINES)
def test_b87_the_commit_is_one_put_and_the_last(
    s3: S3Service, url: str, proxy: S3Proxy, engine: str
) -> None:
    save(url, 1, storage_options={"engine": engine, **s3.options(endpoint=proxy.endpoint)})
    puts = [each.path for each in proxy.requests("PUT")]
    assert puts[-1].endswith("/commits/0000000001/zarr.json")
    assert len([path for path in puts if "commits/0" in path]) == 1
    assert not any("uploads" in each.query or "uploadId" in each.query for each in proxy.log)
    assert not any("x-amz-copy-source" in map(str.lower, headers) for headers in proxy.headers)


# B88: URLs.


def test_b88_forms_of_one_place(
    s3: S3Service, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    name = secrets.token_hex(4)
    groups: list[tuple[list[str | Path], dict[str, object]]] = [
        ([f"s3://{bucket}/{name}", f"s3://{bucket}/{name}/", f"s3://{bucket}//{name}"],
         s3.options()),
        ([f"file://{tmp_path}/x", f"{tmp_path}/x/", "x", "./x", tmp_path / "x"], {}),
        (["~/x", tmp_path / "home" / "x"], {}),
        ([f"{tmp_path}/with space/é", f"file://{tmp_path}/with%20space/%C3%A9"], {}),
        ([f"memory://{name}", f"memory://{name}/"], {}),
        ([f"local://{tmp_path}/y", f"local://{tmp_path}/y/"], {}),
    ]  # fmt: skip
    for number, (forms, options) in enumerate(groups):
        save(str(forms[0]), number, storage_options=options)
        for form in forms:
            check(str(form), number, storage_options=options)
    (tmp_path / "link").symlink_to("x")
    check("link", 1)
    for typo in ("s3:/b/k", Path("s3://b/k"), "gs:/b/k", "memory:/x"):
        with pytest.raises(ucpstore.StateError, match="lost a slash"):
            ucpstore.save(typo, {"a": 1}, step=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "home", "link", "with space", "x", "y",
    ]  # fmt: skip


# B89: endpoints and libraries.


@pytest.mark.parametrize("engine", ENGINES)
def test_b89_what_one_library_saved_the_other_loads(
    s3: S3Service, url: str, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    other = ENGINES[1 - ENGINES.index(engine)]
    save(url, 1, storage_options={"engine": engine, **s3.options()})
    check(url, 1, storage_options={"engine": other, **s3.options()})
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    check(url, 1, storage_options={"engine": other})
    check(url, 1)
    mine, theirs = (open_storage(url, {"engine": each}) for each in (engine, other))
    assert sorted(each.key for each in mine.list("")) == sorted(
        each.key for each in theirs.list("")
    )
    for entry in mine.list(""):
        assert mine.get(entry.key) == theirs.get(entry.key)


def test_b89_an_endpoint_needs_its_scheme(url: str) -> None:
    for wrong, words in (
        ({"endpoint_url": "localhost:9000"}, "must start with http"),
        ({"endpoint_url": "s3://b"}, "must start with http"),
        ({"endpoint": "http://localhost:9000"}, "did you mean 'endpoint_url'?"),
        ({"engine": "boto"}, "must be one of obstore, s3fs"),
    ):
        with pytest.raises(ucpstore.StateError, match=words.replace("?", r"\?")):
            ucpstore.CheckpointStore(url, wrong)


# B90: limits of S3.


@pytest.mark.parametrize("engine", ENGINES)
def test_b90_objects_above_the_limit_of_one_put_are_refused(
    s3: S3Service, url: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr("ucpstore.storage.objects.MAX_PUT_BYTES", 200_000)
    options = {"engine": engine, **s3.options(endpoint=proxy.endpoint)}
    state = {"m": {"w": torch.randn(300, 300)}}
    with pytest.raises(ucpstore.StorageError, match="at most 200000 in one request"):
        ucpstore.save(url, state, step=1, storage_options=options)
    assert ucpstore.CheckpointStore(url, options).steps() == []
    left = [each.key for each in open_storage(url, options).list("steps/")]
    assert left == ["steps/zarr.json"]
    assert not any("upload" in each.query for each in proxy.log)
