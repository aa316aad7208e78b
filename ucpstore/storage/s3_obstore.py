"""S3 requests through obstore, which sends them again by itself while a server is busy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import ModuleType
from typing import cast

from ucpstore.storage.s3_engine import engine
from ucpstore.storage.s3_errors import Failure
from ucpstore.storage.s3_options import Resolved
from ucpstore.storage.s3_requests import Listed


class ObstoreRequests:
    """`retries` and the waits of obstore's own, of which the first is `wait_s` long."""

    def __init__(
        self,
        bucket: str,
        found: Resolved,
        *,
        retries: int,
        limit_s: float,
        timeout_s: float,
        wait_s: float,
        longest_wait_s: float,
    ) -> None:
        self._lib: ModuleType = engine()
        # All that obstore would otherwise take from the environment by rules of its own is given.
        own = found.endpoint is not None
        config: dict[str, object] = {
            "region": found.region,
            "virtual_hosted_style_request": found.virtual_hosted(bucket),
            "skip_signature": found.provider is None,
            "request_payer": found.requester_pays,
            "conditional_put": "etag",
        }
        if own:
            config |= {"endpoint": found.endpoint, "aws_endpoint_url_s3": found.endpoint}
        self._store = self._lib._store.S3Store(
            bucket,
            config=config,
            client_options={
                "allow_http": own and str(found.endpoint).startswith("http://"),
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=timeout_s),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=limit_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=wait_s),
                    "max_backoff": timedelta(seconds=longest_wait_s),
                    "base": 2,
                },
            },
            credential_provider=found.provider,
        )

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        return (self._lib.exceptions.BaseError, FileNotFoundError)

    @property
    def resends(self) -> bool:
        return True

    def failure(self, error: BaseException) -> Failure:
        return Failure.of(error)

    def put(self, path: str, data: memoryview) -> None:
        self._lib.put(self._store, path, data, use_multipart=False)

    def create(self, path: str, data: memoryview) -> int | None:
        try:
            self._lib.put(self._store, path, data, mode="create", use_multipart=False)
        except self._lib.exceptions.AlreadyExistsError as error:
            return Failure.of(error).status or 412
        return None

    def get(self, path: str) -> bytes:
        return cast("bytes", self._lib.get(self._store, path).bytes().to_bytes())

    def get_into(self, path: str, start: int, view: memoryview) -> int:
        try:
            data = self._lib.get_range(self._store, path, start=start, length=len(view))
        except self._lib.exceptions.BaseError as error:
            if Failure.of(error).status != 416:
                raise
            return 0
        if len(data) == len(view):
            view[:] = memoryview(data)
        return len(data)

    def head(self, path: str) -> int:
        return int(self._lib.head(self._store, path)["size"])

    def page(
        self, prefix: str, after: object | None, count: int
    ) -> tuple[Sequence[Listed], object | None]:
        pages = cast("Iterator[Sequence[Mapping[str, object]]]", after) or iter(
            self._lib.list(self._store, prefix or None, chunk_size=count)
        )
        found = next(pages, None)
        if not found:
            return (), None
        return [_listed(each) for each in found], pages

    def folders(self, prefix: str) -> Iterable[str]:
        found = self._lib.list_with_delimiter(self._store, prefix or None)
        return cast("Iterable[str]", found["common_prefixes"])

    def delete(self, paths: Sequence[str]) -> None:
        self._lib.delete(self._store, list(paths))

    def copy(self, source: str, target: str) -> None:
        self._lib.copy(self._store, source, target)


def _listed(found: Mapping[str, object]) -> Listed:
    modified = found["last_modified"]
    assert isinstance(modified, datetime)
    return Listed(str(found["path"]), int(str(found["size"])), modified.timestamp())
