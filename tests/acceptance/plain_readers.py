"""Reads a checkpoint with plain Zarr tools alone, as a program that does not know ucpstore.

    python plain_readers.py READER FOLDER REFERENCE

REFERENCE is an .npz file of raw bytes by array path. Every reader prints how many arrays it read
bit for bit, and exits with an error at the first difference or warning.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

warnings.simplefilter("error")


def same(path: str, found: np.ndarray, reference: Mapping[str, np.ndarray]) -> None:
    raw = np.ascontiguousarray(found).tobytes()
    if raw != reference[path].tobytes():
        raise SystemExit(f"{path}: the bytes differ")


def with_zarr(folder: Path, reference: Mapping[str, np.ndarray]) -> int:
    """Walk from the root of the store, as a browser would."""
    import zarr

    step = next((folder / "steps").glob("*-*")).name
    read = 0
    for path, node in zarr.open_group(str(folder), mode="r").members(max_depth=None):
        if isinstance(node, zarr.Array):
            same(path.removeprefix(f"steps/{step}/"), np.asarray(node[...]), reference)
            read += 1
    return read


def with_zarr_over_s3(url: str, reference: Mapping[str, np.ndarray]) -> int:
    """The same through an object store; credentials come from the environment."""
    import os

    import zarr
    from obstore.store import S3Store

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    store = S3Store(
        bucket,
        prefix=prefix,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    group = zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r")
    read = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for path, node in group.members(max_depth=None):
            if isinstance(node, zarr.Array):
                same(path.split("/", 2)[2], np.asarray(node[...]), reference)
                read += 1
    for each in caught:
        # SeaweedFS goes on listing a prefix for minutes after its last object went; S3 does not.
        name = str(each.message).split()[2]
        if any(found for found in store.list(f"work/{name}")):
            raise SystemExit(str(each.message))
    return read


def with_tensorstore(folder: Path, reference: Mapping[str, np.ndarray]) -> int:
    import tensorstore

    step = next((folder / "steps").glob("*-*"))
    read = 0
    for path in reference:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{step / path}/"}}
        same(path, tensorstore.open(spec, open=True, read=True).result().read().result(), reference)
        read += 1
    return read


def with_xarray(folder: Path, reference: Mapping[str, np.ndarray]) -> int:
    """Each item is a dataset, or a tree of them."""
    import xarray

    step = next((folder / "steps").glob("*-*"))
    read = 0
    for item in sorted({path.partition("/")[0] for path in reference if "/" in path}):
        tree = xarray.open_datatree(step / item, engine="zarr", mask_and_scale=False)
        for group in tree.subtree:
            inner = group.relative_to(tree).strip("./")
            for name, variable in group.data_vars.items():
                path = "/".join(part for part in (item, inner, str(name)) if part)
                same(path, variable.values, reference)
                read += 1
    return read


def with_zarr_float32_only(folder: Path, reference: Mapping[str, np.ndarray]) -> int:
    """Where ucpstore is not installed: items without unknown types open."""
    import importlib.metadata

    import zarr

    for distribution in importlib.metadata.distributions():
        if distribution.metadata["Name"] == "ucpstore":
            raise SystemExit("ucpstore is installed here")
    step = next((folder / "steps").glob("*-*"))
    read = 0
    for item in sorted({path.partition("/")[0] for path in reference}):
        documents = list((step / item).rglob("zarr.json"))
        dtypes = {json.loads(each.read_text()).get("data_type") for each in documents}
        if "bfloat16" in dtypes:
            continue
        for path, node in zarr.open_group(str(step / item), mode="r").members(max_depth=None):
            if isinstance(node, zarr.Array):
                same(f"{item}/{path}", np.asarray(node[...]), reference)
                read += 1
    return read


if __name__ == "__main__":
    reader, place, npz = sys.argv[1:]
    if len(sys.path) and "ucpstore" in sys.modules:
        raise SystemExit("ucpstore was imported")
    with np.load(npz) as loaded:
        expected = dict(loaded)
    target = place if place.startswith("s3:") else Path(place)
    print(globals()[reader](target, expected))  # noqa: T201  # the test reads it
