"""S3 requests through s3fs: its session and its event loop, but every key as it is.

s3fs's file methods strip, split and glob paths and keep listings; here only the client that it
makes is used, so that a key is a key and an answer is the server's. Nothing below sends a request
again by itself: that is decided in `ucpstore.storage.objects`.

fsspec runs requests on a thread and an event loop of its own, so that callers may be in any thread
and inside any running loop. A filesystem belongs to the process that made it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ucpstore.errors import StorageError
from ucpstore.storage.s3_errors import Failure
from ucpstore.storage.s3_options import Resolved
from ucpstore.storage.s3_requests import Listed

if TYPE_CHECKING:
    import s3fs  # type: ignore[import-untyped]  # it has no types

_DELETE_BATCH = 1000
T = TypeVar("T")


class S3fsRequests:
    """Requests with one set of credentials, looked up when this is made."""

    def __init__(self, bucket: str, found: Resolved, *, timeout_s: float) -> None:
        self._bucket = bucket
        self._fs = _file_system(bucket, found, timeout_s)

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        import aiohttp
        from botocore.exceptions import (  # type: ignore[import-untyped]
            BotoCoreError,
            ClientError,
        )

        return (OSError, BotoCoreError, ClientError, aiohttp.ClientError, _RefusedError)

    @property
    def resends(self) -> bool:
        return False

    def failure(self, error: BaseException) -> Failure:
        return _failure(error)

    def put(self, path: str, data: memoryview) -> None:
        self._call("put_object", Key=path, Body=bytes(data))

    def create(self, path: str, data: memoryview) -> int | None:
        try:
            self._call("put_object", Key=path, Body=bytes(data), IfNoneMatch="*")
        except self.errors as error:
            status = _failure(error).status
            if status in (409, 412):
                return status
            raise
        return None

    def get(self, path: str) -> bytes:
        return self._run(_get, Bucket=self._bucket, Key=path)

    def get_into(self, path: str, start: int, view: memoryview) -> int:
        end = start + len(view) - 1
        try:
            data = self._run(_get, Bucket=self._bucket, Key=path, Range=f"bytes={start}-{end}")
        except self.errors as error:
            if _failure(error).status != 416:
                raise
            return 0
        if len(data) == len(view):
            view[:] = data
        return len(data)

    def head(self, path: str) -> int:
        return int(str(self._call("head_object", Key=path)["ContentLength"]))

    def page(
        self, prefix: str, after: object | None, count: int
    ) -> tuple[Sequence[Listed], object | None]:
        more = {"ContinuationToken": after} if after else {}
        answer = self._call("list_objects_v2", Prefix=prefix, MaxKeys=count, **more)
        found = cast("Sequence[Mapping[str, object]]", answer.get("Contents", ()))
        return [_listed(each) for each in found], answer.get("NextContinuationToken")

    def folders(self, prefix: str) -> Iterable[str]:
        token: object | None = None
        while True:
            more = {"ContinuationToken": token} if token else {}
            answer = self._call("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            found = cast("Sequence[Mapping[str, str]]", answer.get("CommonPrefixes", ()))
            yield from (each["Prefix"] for each in found)
            token = answer.get("NextContinuationToken")
            if not token:
                return

    def delete(self, paths: Sequence[str]) -> None:
        for at in range(0, len(paths), _DELETE_BATCH):
            keys = [{"Key": path} for path in paths[at : at + _DELETE_BATCH]]
            answer = self._call("delete_objects", Delete={"Objects": keys, "Quiet": True})
            errors = cast("Sequence[Mapping[str, str]]", answer.get("Errors", ()))
            for error in errors:
                if error.get("Code") != "NoSuchKey":
                    raise _RefusedError(error.get("Code", ""), error.get("Message", ""))

    def copy(self, source: str, target: str) -> None:
        self._call("copy_object", Key=target, CopySource={"Bucket": self._bucket, "Key": source})

    def _call(self, method: str, **arguments: object) -> Mapping[str, object]:
        return self._run(_send, method, Bucket=self._bucket, **arguments)

    def _run(self, call: Callable[..., Coroutine[Any, Any, T]], *which: str, **of: object) -> T:
        import fsspec.asyn  # type: ignore[import-untyped]  # it has no types

        return cast("T", fsspec.asyn.sync(self._fs.loop, call, self._fs, *which, **of))


class _RefusedError(Exception):
    """One key of a deletion of many, whose answer as a whole is 200."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def _send(fs: s3fs.S3FileSystem, name: str, **arguments: object) -> Mapping[str, object]:
    method = getattr(await fs.set_session(), name)
    answer = await method(**fs._get_s3_method_kwargs(method, **arguments))
    return cast("Mapping[str, object]", answer)


async def _get(fs: s3fs.S3FileSystem, **arguments: object) -> bytes:
    answer = await _send(fs, "get_object", **arguments)
    async with cast("Any", answer["Body"]) as body:
        return cast("bytes", await body.read())


def arguments(bucket: str, found: Resolved, timeout_s: float) -> dict[str, object]:
    """What s3fs is made with for `bucket`; holds the credentials as they are now."""
    given = found.provider() if found.provider else None
    return {
        "anon": given is None,
        "key": given["access_key_id"] if given else None,
        "secret": given["secret_access_key"] if given else None,
        "token": given["token"] if given else None,
        "endpoint_url": found.endpoint,
        "requester_pays": found.requester_pays,
        "client_kwargs": {"region_name": found.region},
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": timeout_s,
            "max_pool_connections": 64,
            "s3": {"addressing_style": "virtual" if found.virtual_hosted(bucket) else "path"},
            # Checksums that servers other than Amazon's may not know.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    }


def _file_system(bucket: str, found: Resolved, timeout_s: float) -> s3fs.S3FileSystem:
    import s3fs

    given = arguments(bucket, found, timeout_s)
    given["config_kwargs"] = {
        **cast("dict[str, object]", given["config_kwargs"]),
        "http_session_cls": _once_session(),
        "retries": {"total_max_attempts": 1},
    }
    # Not shared with the user's own code, whose instance may have another loop, listings that it
    # keeps, or a token that has expired.
    return s3fs.S3FileSystem(
        **given, session=_session(os.getpid()), use_listings_cache=False, skip_instance_cache=True
    )


@functools.lru_cache(maxsize=1)
def _session(pid: int) -> object:
    """One for all clients of a process: it keeps the model of S3, which takes long to read."""
    import aiobotocore.session  # type: ignore[import-untyped]

    return aiobotocore.session.AioSession()


def _once_session() -> type:
    """aiobotocore's session without aiohttp's habit of sending a PUT again on its own.

    aiohttp repeats what it takes for idempotent when the connection drops before the answer (3.14),
    which `put_if_absent` is not: the second try would be told that an object is there.
    """
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class OnceSession(AIOHTTPSession):  # type: ignore[misc]  # it has no types
        async def _get_session(self, proxy_url: str | None) -> object:
            session = await super()._get_session(proxy_url)
            if not hasattr(session, "_retry_connection"):
                raise StorageError("this version of aiohttp is not known; use engine='obstore'")
            session._retry_connection = False
            return session

    return OnceSession


def _listed(found: Mapping[str, object]) -> Listed:
    modified = found["LastModified"]
    assert isinstance(modified, datetime)
    return Listed(str(found["Key"]), int(str(found["Size"])), modified.timestamp())


def _failure(error: BaseException) -> Failure:
    """Worded as the errors of obstore are, on which `Failure` looks."""
    import aiohttp
    import botocore.exceptions  # type: ignore[import-untyped]

    if isinstance(error, _RefusedError):
        status = 403 if error.code == "AccessDenied" else 400
        return Failure(status, error.code, f"<Message>{error}</Message>")
    if isinstance(error, botocore.exceptions.ClientError):
        said = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(said.get("Code", ""))
        if code.isdigit():  # an answer without a body, as to HEAD
            status, code = status or int(code), ""
        return Failure(int(status or 500), code, f"<Message>{said.get('Message', '')}</Message>")
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, botocore.exceptions.SSLError):
        return Failure(None, "", f"certificate: {text}")
    if isinstance(error, botocore.exceptions.EndpointConnectionError):
        unknown = isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorDNSError)
        return Failure(None, "", f"{'dns error: ' if unknown else ''}{text} kind: Connect")
    if isinstance(error, botocore.exceptions.ConnectTimeoutError):
        return Failure(None, "", f"{text} kind: Connect")
    if isinstance(error, botocore.exceptions.ReadTimeoutError | TimeoutError):
        return Failure(None, "", f"{text} kind: Timeout")
    broken = (botocore.exceptions.HTTPClientError, ConnectionError, aiohttp.ClientError)
    return Failure(None, "", f"{text} kind: Body" if isinstance(error, broken) else text)
