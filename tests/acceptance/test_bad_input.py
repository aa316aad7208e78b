"""Bad input is refused with a clear error, before anything is written or overwritten."""

from __future__ import annotations

import datetime
import enum
import json
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import obstore
import pytest
import torch
from obstore.store import S3Store
from services.seaweed import S3Service
from torch.distributed.tensor import DTensor, Partial

import ucpstore
from ucpstore.errors import (
    CorruptError,
    FormatError,
    MismatchError,
    StateError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UcpstoreError,
    UnsupportedError,
)
from ucpstore.format.documents import crc32c
from ucpstore.format.record import CommitRecord, DocumentEntry, arrays_crc32c

Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1


class Step(int):
    pass


def state(start: int = 0) -> dict[str, object]:
    return {
        "m": {
            "w": torch.arange(start, start + 12, dtype=torch.float32).reshape(3, 4),
            "b": torch.full((4,), start, dtype=torch.bfloat16),
        },
        "n": np.arange(start, start + 3),
        "progress": {"seen": start, "name": f"run {start}"},
    }


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder; a folder without files counts as one."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"/"
        for path in folder.rglob("*")
    }


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Where there is nothing yet, not even a folder."""
    return tmp_path / "store"


@pytest.fixture
def saved(url: Path) -> Path:
    """A store with step 1."""
    ucpstore.save(url, state(1), step=1, metadata={"a": 1})
    return url


def refuse(
    error: type[UcpstoreError], words: tuple[str, ...], folder: Path, action: Callable[[], object]
) -> str:
    """`action` raises `error` with all `words`, and nothing below `folder` changes."""
    there = folder.exists()
    before = contents(folder)
    with pytest.raises(error) as caught:
        action()
    text = str(caught.value)
    assert type(caught.value) is error
    assert [word for word in words if word not in text] == [], text
    assert folder.exists() == there
    assert contents(folder) == before
    return text


# -- what cannot be stored -----------------------------------------------------------------------


def quietly(make: Callable[[], object]) -> object:
    """A value that torch warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


UNSUPPORTED: Mapping[str, tuple[Callable[[], object], str, str]] = {
    # what it is: how to make it, what the message says of it, and what to do
    "lambda": (lambda: lambda: 0, "functions and classes", "build them again after load"),
    "class": (lambda: int, "functions and classes", "build them again after load"),
    "named tuple": (lambda: Point(1, 2), "named tuple", "save its _asdict() or a tuple"),
    "enum": (lambda: Color.RED, "enum member Color.RED", "save its name or value"),
    "datetime": (lambda: datetime.datetime(2026, 1, 2), "datetime.datetime", "save str(...)"),
    "subclass": (lambda: Step(3), "would come back as a int", "save int(...) of it"),
    "object": (object, "a builtins.object", "give it state_dict() and load_state_dict()"),
    "object array": (lambda: np.array([None]), "dtype object", "convert it to numbers"),
    "long double": (lambda: np.longdouble(1), "float128", "such as float64"),
    "complex32": (
        lambda: torch.zeros(2, dtype=torch.complex32),
        "torch.complex32",
        "convert the tensor to complex64",
    ),
    "scalar complex32": (
        lambda: torch.tensor(1, dtype=torch.complex32),
        "torch.complex32",
        "convert the tensor to complex64",
    ),
    "float4": (
        lambda: torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "torch.float4_e2m1fn_x2",
        "save view(torch.uint8) of it",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "torch.quint8",
        "save int_repr(), scales and zero points",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo", "save its dense form"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr", "its dense form"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "layout nested",
        "save its dense form",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "NestedTensor",
        "save the tensors it is made of",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device", "materialise it first"),
    "key": (lambda: {object(): 1}, "a dict key of type builtins.object", "a string or a number"),
    "key of a tensor": (
        lambda: {object(): torch.ones(2)},
        "a dict key of type builtins.object",
        "a string or a number",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_cannot_be_stored_is_refused_by_name(url: Path, kind: str) -> None:
    make, found, advice = UNSUPPORTED[kind]
    value = quietly(make)
    for bad in ({"m": {**state()["m"], "x": value}}, {"m": {"deep": [1, {"x": value}]}}):  # type: ignore[dict-item]
        place = "m.x" if "x" in bad["m"] else "m.deep.1.x"
        refuse(UnsupportedError, (place, found, advice), url, lambda bad=bad: save(url, bad))


def save(url: Path, bad: object, **arguments: object) -> None:
    ucpstore.save(url, bad, **{"step": 2, **arguments})  # type: ignore[arg-type]


def partial_sums(url: str) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedError) as caught:
        ucpstore.save(url, {"m": {"w": tensor}}, step=1)
    return str(caught.value)


def test_sums_that_are_not_reduced_are_refused(ranks: object, url: Path) -> None:
    for text in ranks.run(2, partial_sums, str(url)):  # type: ignore[attr-defined]
        assert "m.w: a DTensor with placement" in text
        assert "redistribute it to Replicate()" in text
    assert not url.exists()


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (-1, ("from 0 to", "it is -1")),
        (2**63, ("from 0 to 9223372036854775807",)),
        (1.5, ("must be an integer", "1.5 of type float")),
        (True, ("must be an integer", "True of type bool")),
        ("3", ("must be an integer", "'3' of type str")),
        (np.float32(3), ("must be an integer", "of type float32")),
    ],
)
def test_steps_that_are_no_steps(saved: Path, step: object, words: tuple[str, ...]) -> None:
    refuse(StateError, ("step must be", *words), saved, lambda: save(saved, state(), step=step))
    target = state(7)
    refuse(StateError, ("step must be", *words), saved, lambda: load(saved, target, step=step))
    unchanged(target, state(7))


def test_a_numpy_integer_is_a_step(url: Path) -> None:
    save(url, state(5), step=np.int64(3))
    target = state(0)
    assert ucpstore.load(url, target, step=np.int64(3)).step == 3  # type: ignore[arg-type]
    unchanged(target, state(5))
    assert ucpstore.CheckpointStore(url).steps() == [3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overwrite": "yes"}, ("overwrite must be True or False", "'yes'")),
        ({"check_replicas": "some"}, ("check_replicas must be", "'always'", "'some'")),
        ({"per_rank": 5}, ("per_rank must be a name pattern", "5")),
        ({"per_rank": ["a", 5]}, ("per_rank must be a name pattern", "['a', 5]")),
        ({"options": {"threads": 3}}, ("options must be a ucpstore.Options", "threads")),
        ({"metadata": {"a": {1}}}, ("metadata must be plain JSON", "set", "into the state")),
        ({"metadata": {"a": float("nan")}}, ("metadata must be plain JSON", "finite")),
        ({"metadata": {"a": [{1: 2}]}}, ("metadata must be", "metadata['a'][0]", "key 1")),
        ({"metadata": {"a": (1,)}}, ("metadata must be", "metadata['a'] is a tuple")),
        ({"metadata": {"a": "x" * 65530}}, ("metadata must have at most 65536 bytes", "65538")),
    ],
)
def test_arguments_of_save(url: Path, arguments: dict[str, object], words: tuple[str, ...]) -> None:
    refuse(StateError, words, url, lambda: save(url, state(), **arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strict": "no"}, ("strict must be True or False", "'no'")),
        ({"collective": "no"}, ("collective must be True or False", "'no'")),
        ({"cast": True}, ("cast must be a name pattern", "True")),
        ({"options": 3}, ("options must be a ucpstore.Options", "3")),
    ],
)
def test_arguments_of_load(
    saved: Path, arguments: dict[str, object], words: tuple[str, ...]
) -> None:
    target = state(7)
    refuse(StateError, words, saved, lambda: load(saved, target, **arguments))
    unchanged(target, state(7))


@pytest.mark.parametrize("bad", [[torch.ones(2)], torch.nn.Linear(2, 2), None])
def test_a_state_is_a_dict(saved: Path, bad: object) -> None:
    words = ("state must be a dict", type(bad).__name__, "{'model': model")
    refuse(StateError, words, saved, lambda: save(saved, bad))
    refuse(StateError, words, saved, lambda: load(saved, bad))


def test_a_process_group_is_one_of_torch(url: Path) -> None:
    words = ("process_group must be a torch process group", "int", "mesh.get_group()")
    refuse(ucpstore.AgreementError, words, url, lambda: save(url, state(), process_group=3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"threads": 0}, ("option threads must be a whole number above 0", "0")),
        ({"threads": 1.5}, ("option threads must be a whole number", "1.5")),
        ({"threads": True}, ("option threads must be a whole number", "True")),
        ({"chunk_bytes": -1}, ("option chunk_bytes", "-1")),
        ({"report_timeout_s": float("inf")}, ("option report_timeout_s", "inf")),
        ({"arrive_timeout_s": float("nan")}, ("option arrive_timeout_s", "nan")),
        ({"arrive_timeout_s": "3"}, ("option arrive_timeout_s", "'3'")),
    ],
)
def test_options(given: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(StateError) as caught:
        ucpstore.Options(**given)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UCPSTORE_THREADS", "many"),
        ("UCPSTORE_THREADS", "2.5"),
        ("UCPSTORE_CHUNK_BYTES", "0"),
        ("UCPSTORE_ARRIVE_TIMEOUT_S", "nan"),
        ("UCPSTORE_REPORT_TIMEOUT_S", ""),
    ],
)
def test_environment_variables(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    target = state(7)
    words = (f"environment variable {name} must be a ", "number above 0", value)
    refuse(StateError, words, saved, lambda: save(saved, state()))
    refuse(StateError, words, saved, lambda: load(saved, target))
    unchanged(target, state(7))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("gsx://bucket/run", ("scheme 'gsx' is not known", "s3://bucket/prefix")),
        ("gs://bucket/run", ("'gs://bucket/run'", "needs a package that is missing", "gcsfs")),
        ("s3:/bucket/run", ("lost a slash", "pathlib", "'s3://bucket/run'")),
        (Path("s3://bucket/run"), ("lost a slash", "pathlib", "'s3://bucket/run'")),
        ("s3://", ("is not of the form s3://bucket/prefix",)),
        ("s3://me:secret@bucket/run", ("credentials do not belong", "storage_options")),
        ("file://host/run", ("names a host", "file:///path")),
        ("", ("is not a path", "s3://bucket/prefix")),
    ],
)
def test_urls(place: str | Path, words: tuple[str, ...], tmp_path: Path) -> None:
    for action in (save, load):
        text = refuse(StateError, words, tmp_path, lambda action=action: action(place, state()))  # type: ignore[misc]
        assert "secret" not in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpont_url": "http://x"}, ("'endpont_url'", "did you mean 'endpoint_url'?")),
        ({"secrt": "x"}, ("'secrt'", "did you mean 'secret'?")),
        ({"xyzzy": 1}, ("'xyzzy'", "Known are key, secret,")),
        ({"client_kwargs": {"region": "x"}}, ("'region'", "did you mean 'region_name'?")),
        ({"key": "a"}, ("'key' and 'secret'", "belong together")),
        ({"anon": "yes"}, ("'anon' must be True or False",)),
        ({"endpoint_url": "host:9000"}, ("'host:9000'", "http:// or https://")),
        (["key"], ("storage_options must be a dict", "list")),
    ],
)
def test_storage_options(given: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(StateError) as caught:
        ucpstore.CheckpointStore("s3://bucket/run", given)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_takes_no_storage_options(url: Path) -> None:
    words = ("takes no storage options", "key, secret")
    given = {"key": "a", "secret": "b"}
    refuse(StateError, words, url, lambda: save(url, state(), storage_options=given))


# -- steps ---------------------------------------------------------------------------------------


def test_a_step_that_exists(saved: Path) -> None:
    words = ("step 1 is already committed", str(saved), "overwrite=True")
    refuse(StepExistsError, words, saved, lambda: save(saved, state(2), step=1))


def test_a_step_that_is_not_there(saved: Path) -> None:
    target = state(7)
    words = ("step 5 is not in", str(saved), "committed are 1")
    refuse(StepNotFoundError, words, saved, lambda: load(saved, target, step=5))
    unchanged(target, state(7))


def test_a_step_that_did_not_finish(saved: Path) -> None:
    (saved / "steps" / "0000000005-0123456789ab").mkdir()
    (saved / "steps" / "0000000005-0123456789ab" / "zarr.json").write_text("{}")
    words = ("step 5 is not committed", "did not finish", "committed are 1")
    refuse(StepNotFoundError, words, saved, lambda: load(saved, state(), step=5))


@pytest.mark.parametrize("step", [None, 5])
def test_a_place_without_a_store(url: Path, step: int | None) -> None:
    words = ("no committed step" if step is None else "step 5 is not in", str(url))
    refuse(StepNotFoundError, words, url, lambda: load(url, state(), step=step))
    url.mkdir()
    (url / "model.bin").write_bytes(b"1")
    refuse(StepNotFoundError, words, url, lambda: load(url, state(), step=step))


# -- targets -------------------------------------------------------------------------------------


def load(url: object, target: object, **arguments: object) -> None:
    ucpstore.load(url, target, **arguments)  # type: ignore[arg-type]


def unchanged(found: object, expected: object) -> None:
    """Whether two states are equal bit for bit."""
    assert type(found) is type(expected)
    if isinstance(found, Mapping):
        assert list(found) == list(expected)  # type: ignore[call-overload]
        for key in found:
            unchanged(found[key], expected[key])  # type: ignore[index]
    elif isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype  # type: ignore[attr-defined]
        assert found.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()  # type: ignore[attr-defined]
    elif isinstance(found, np.ndarray):
        assert found.tobytes() == expected.tobytes()  # type: ignore[attr-defined]
    else:
        assert found == expected


def other(**changes: object) -> dict[str, object]:
    """The target with some values of item `m` replaced."""
    target = state(7)
    assert isinstance(target["m"], dict)
    target["m"].update(changes)
    return target


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: other(w=torch.zeros(4, 3)),
            ("1 difference", "m.w: stored with shape (3, 4), the target has shape (4, 3)"),
        ),
        (
            lambda: other(w=torch.zeros(3, 4, dtype=torch.float64)),
            ("m.w: stored as float32, the target is float64", "cast='m.w'"),
        ),
        (
            lambda: other(w=torch.zeros(3, 4, dtype=torch.int32)),
            ("m.w: stored as float32", "never converted to int", "make the target float32"),
        ),
        (
            lambda: other(v=torch.zeros(3), u=torch.zeros(3)),
            ("2 differences", "not in the checkpoint: m.v, m.u", "strict=False"),
        ),
        (
            lambda: {**state(7), "m": {"v": torch.zeros(3)}, "extra": {"x": 1}},
            ("4 differences", "not in the checkpoint: m.v, extra", "not in the target: m.w, m.b"),
        ),
        (
            lambda: {**other(w=torch.zeros(1), v=torch.zeros(1)), "n": np.zeros(2)},
            ("3 differences", "not in the checkpoint: m.v", "m.w: stored with shape", "n: "),
        ),
        (
            lambda: {**state(7), "m": torch.zeros(3)},
            ("m: the target is a tensor, but", "was saved"),
        ),
        (
            lambda: {**state(7), "progress": OrderedDict(seen=1, other=2)},
            ("not in the checkpoint: progress.other", "not in the target: progress.name"),
        ),
    ],
    ids=["shape", "dtype", "kind", "missing", "names", "all at once", "structure", "values"],
)
def test_targets_that_do_not_fit_are_not_touched(
    saved: Path, make: Callable[[], dict[str, object]], words: tuple[str, ...]
) -> None:
    target = make()
    words = ("the target does not fit the checkpoint", "nothing was changed", *words)
    refuse(MismatchError, words, saved, lambda: load(saved, target))
    unchanged(target, make())


def test_unsupported_targets_are_not_touched(saved: Path) -> None:
    target = other(w=torch.eye(3, 4).to_sparse())
    words = ("m.w: a tensor of layout torch.sparse_coo", "dense form")
    refuse(UnsupportedError, words, saved, lambda: load(saved, target))
    assert target["progress"] == {"seen": 7, "name": "run 7"}


# -- stores that cannot be read ------------------------------------------------------------------


def rewrite(store: Path, change: Callable[[CommitRecord], CommitRecord]) -> None:
    """Replace the commit record of step 1, with a checksum that is right."""
    key = "commits/0000000001/zarr.json"
    record = change(CommitRecord.from_bytes((store / key).read_bytes(), key))
    (store / key).write_bytes(record.to_bytes())


def test_a_newer_format_version(saved: Path) -> None:
    rewrite(saved, lambda record: replace(record, format_version=2))
    target = state(7)
    words = ("format version 2", "reads versions up to 1", "upgrade ucpstore")
    refuse(FormatError, words, saved, lambda: load(saved, target))
    refuse(FormatError, words, saved, lambda: ucpstore.CheckpointStore(saved).open())
    unchanged(target, state(7))


def test_a_feature_that_is_not_known(saved: Path) -> None:
    features = ("packed-row-major", "holograms", "zstd")
    rewrite(saved, lambda record: replace(record, features=features))
    target = state(7)
    words = ("needs holograms, zstd", "does not know", "upgrade ucpstore")
    refuse(FormatError, words, saved, lambda: load(saved, target))
    unchanged(target, state(7))


def patch_item(store: Path, item: str, change: Callable[[dict[str, object]], None]) -> None:
    """Change the metadata of an item's arrays, with all checksums right."""
    (folder,) = store.glob("steps/*-*")
    path = f"{item}/zarr.json"
    document = json.loads((folder / path).read_bytes())
    change(document["consolidated_metadata"]["metadata"])
    raw = json.dumps(document, separators=(",", ":")).encode()
    (folder / path).write_bytes(raw)
    rewrite(
        store,
        lambda record: replace(
            record,
            documents=tuple(
                DocumentEntry(path, len(raw), crc32c(raw)) if each.path == path else each
                for each in record.documents
            ),
            arrays_crc32c=arrays_crc32c([]),
        ),
    )


def test_a_layout_that_is_not_known(saved: Path) -> None:
    def compress(arrays: dict[str, object]) -> None:
        arrays["w"]["codecs"].append({"name": "rot13", "configuration": {}})  # type: ignore[index]

    patch_item(saved, "m", compress)
    target = state(7)
    refuse(FormatError, ("m/w", "codecs"), saved, lambda: load(saved, target))
    unchanged(target, state(7))


def test_a_data_type_that_is_not_known(saved: Path) -> None:
    def retype(arrays: dict[str, object]) -> None:
        arrays["w"]["data_type"] = "float7"  # type: ignore[index]

    patch_item(saved, "m", retype)
    target = state(7)
    refuse(FormatError, ("float7", "upgrade"), saved, lambda: load(saved, target))
    unchanged(target, state(7))


def test_a_record_that_is_damaged(saved: Path) -> None:
    path = saved / "commits" / "0000000001" / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b'"world_size":1', b'"world_size":2'))
    target = state(7)
    refuse(CorruptError, ("commits/0000000001",), saved, lambda: load(saved, target))
    unchanged(target, state(7))


# -- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zarr.json", "commits/zarr.json", "work/zarr.json"])
def test_a_folder_of_something_else(url: Path, name: str) -> None:
    (url / name).parent.mkdir(parents=True)
    (url / name).write_text('{"zarr_format":3,"node_type":"group","attributes":{"mine":1}}')
    words = (name, str(url), "something else lies there", "use an empty folder or prefix")
    refuse(FormatError, words, url, lambda: save(url, state()))


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    words = ("cannot write below", "a file is where a folder is needed", "move it away")
    place = tmp_path / "file" / below
    refuse(StorageError, words, tmp_path, lambda: save(place, state()))


class Bucket:
    """A bucket seen through the admin's eyes."""

    def __init__(self, service: S3Service, name: str) -> None:
        key, secret = service.identities["admin"]
        self._store = S3Store(
            name,
            endpoint=service.endpoint,
            access_key_id=key,
            secret_access_key=secret,
            session_token="",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def contents(self) -> dict[str, bytes]:
        pages: Iterator[list[dict[str, object]]] = iter(obstore.list(self._store))
        keys = [str(entry["path"]) for page in pages for entry in page]
        return {key: obstore.get(self._store, key).bytes().to_bytes() for key in keys}


def refuse_there(
    bucket: Bucket, words: tuple[str, ...], secret: str, action: Callable[[], object]
) -> None:
    before = bucket.contents()
    with pytest.raises(StorageError) as caught:
        action()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert secret not in str(caught.value)
    assert bucket.contents() == before


def test_credentials_that_may_only_read(s3: S3Service, s3_bucket: str) -> None:
    place, bucket = f"s3://{s3_bucket}/run", Bucket(s3, s3_bucket)
    reader, secret = s3.options("reader"), s3.identities["reader"][1]

    def save_as_reader() -> None:
        ucpstore.save(place, state(2), step=2, storage_options=reader)

    words = (place, "access denied", "grant these credentials the right")
    refuse_there(bucket, words, secret, save_as_reader)
    assert bucket.contents() == {}
    ucpstore.save(place, state(1), step=1, storage_options=s3.options("writer"))
    refuse_there(bucket, words, secret, save_as_reader)
    target = state(0)
    ucpstore.load(place, target, storage_options=reader)
    unchanged(target, state(1))


def test_wrong_credentials(s3: S3Service, s3_bucket: str) -> None:
    place, bucket = f"s3://{s3_bucket}/run", Bucket(s3, s3_bucket)
    key, secret = s3.identities["writer"]
    for given, words in (
        ({"key": key, "secret": "not-the-secret"}, ("the secret does not belong", "check the cr")),
        ({"key": "nobody", "secret": secret}, ("does not know the access key", "check the cred")),
    ):
        options = {**given, "endpoint_url": s3.endpoint}
        target = state(7)
        for action in (
            lambda options=options: ucpstore.save(place, state(), step=1, storage_options=options),
            lambda options=options, target=target: ucpstore.load(
                place, target, storage_options=options
            ),
        ):
            refuse_there(bucket, (place, *words), given["secret"], action)  # type: ignore[arg-type]
        unchanged(target, state(7))
    assert bucket.contents() == {}


def test_a_bucket_that_is_not_there(s3: S3Service, s3_bucket: str) -> None:
    place = f"s3://{s3_bucket}-gone/run"
    options, secret = s3.options("writer"), s3.identities["writer"][1]
    words = (f"bucket '{s3_bucket}-gone' does not exist", "create it first")
    target = state(7)
    for action in (
        lambda: ucpstore.save(place, state(), step=1, storage_options=options),
        lambda: ucpstore.load(place, target, storage_options=options),
    ):
        refuse_there(Bucket(s3, s3_bucket), words, secret, action)
    unchanged(target, state(7))
    # It would say otherwise if the bucket had been made.
    refuse_there(
        Bucket(s3, s3_bucket),
        words,
        secret,
        lambda: ucpstore.CheckpointStore(place, options).steps(),
    )


def test_bad_states_leave_a_bucket_empty(s3: S3Service, s3_bucket: str) -> None:
    place, bucket = f"s3://{s3_bucket}/run", Bucket(s3, s3_bucket)
    options = s3.options("writer")
    for bad, arguments in (
        ({"m": {"x": lambda: 0}}, {}),
        (state(), {"step": -1}),
        (state(), {"metadata": {"a": {1}}}),
        ({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1), 1: {1}, "1": object()}, {}),
    ):
        with pytest.raises(StateError):
            save(place, bad, storage_options=options, **arguments)  # type: ignore[arg-type]
        assert bucket.contents() == {}
