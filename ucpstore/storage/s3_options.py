"""What the user says about an S3 server, in s3fs's words, and what the environment adds to it.

Arguments win over environment variables, these over the profile files, as in AWS's own tools.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ucpstore.errors import StateError, StorageError

if TYPE_CHECKING:
    import botocore.session  # type: ignore[import-untyped]  # it has no types

_NAMES = ("key", "secret", "token", "anon", "endpoint_url", "profile", "client_kwargs")
_CLIENT_NAMES = ("endpoint_url", "region_name")
_FOUND_FOR = timedelta(minutes=10)  # botocore renews 15 minutes before the end

Credential = dict[str, "str | datetime | None"]


@dataclass(frozen=True, slots=True)
class S3Options:
    """The options as given, checked; what is not given is looked up when a client is made."""

    key: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> S3Options:
        """From `storage_options`; raises StateError naming the option that is not understood."""
        _check_names("storage option", options, _NAMES)
        client = options.get("client_kwargs") or {}
        if not isinstance(client, Mapping):
            raise StateError("storage option 'client_kwargs' must be a dict")
        _check_names("client_kwargs entry", client, _CLIENT_NAMES)
        endpoint = _text(options, "endpoint_url")
        inner = _text(client, "endpoint_url")
        if endpoint and inner and endpoint != inner:
            raise StateError(f"two endpoints are given, {endpoint} and {inner}; give one")
        anon = options.get("anon") or False
        if not isinstance(anon, bool):
            raise StateError(f"storage option 'anon' must be True or False, not {anon!r}")
        given = cls(
            _text(options, "key"),
            _text(options, "secret"),
            _text(options, "token"),
            anon,
            _endpoint(endpoint or inner),
            _text(client, "region_name"),
            _text(options, "profile"),
        )
        if (given.key is None) != (given.secret is None) or (given.token and not given.key):
            raise StateError("storage options 'key' and 'secret' (and 'token') belong together")
        if given.anon and (given.key or given.profile):
            raise StateError("storage option 'anon' excludes 'key' and 'profile'; give one of them")
        return given

    def resolve(self) -> Resolved:
        """Look up what is not given, now. Raises StorageError where no credentials are found."""
        import botocore.exceptions  # type: ignore[import-untyped]
        import botocore.session

        session = botocore.session.Session(profile=self.profile)
        try:
            endpoint = self.endpoint_url or _endpoint(_configured_endpoint(session))
            region = (
                self.region
                or os.environ.get("AWS_REGION")
                or session.get_config_variable("region")
                or "us-east-1"
            )
            return Resolved(endpoint, region, self._provider(session))
        except botocore.exceptions.BotoCoreError as error:
            raise StorageError(
                f"cannot find S3 credentials: {error}; correct the profile, or give the storage "
                "options key and secret"
            ) from error

    def _provider(self, session: botocore.session.Session) -> Callable[[], Credential] | None:
        if self.anon:
            return None
        if self.key is not None:
            # All three of them, so that no AWS_SESSION_TOKEN of other credentials is added.
            given = _credential(self.key, self.secret, self.token, None)
            return lambda: given
        found = session.get_credentials()
        if found is None:
            raise StorageError(
                "no S3 credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a "
                "profile, or give the storage options key and secret, or anon=True for a public "
                "bucket"
            )
        renewed = hasattr(found, "refresh_needed")

        def provide() -> Credential:
            now = found.get_frozen_credentials()
            until = datetime.now(UTC) + _FOUND_FOR if renewed else None
            return _credential(now.access_key, now.secret_key, now.token, until)

        return provide


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where to send requests and who signs them; without `provider` they are not signed."""

    endpoint: str | None
    region: str
    provider: Callable[[], Credential] | None = field(repr=False)


def _credential(
    key: str | None, secret: str | None, token: str | None, until: datetime | None
) -> Credential:
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": until}


def _configured_endpoint(session: botocore.session.Session) -> str | None:
    """AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then the same two of the profile."""
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    found = (
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
        services.get("s3", {}).get("endpoint_url"),
        profile.get("endpoint_url"),
    )
    return next((str(each) for each in found if each), None)


def _endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise StateError(f"endpoint {url!r} must start with http:// or https://")
    return url.rstrip("/")


def _text(options: Mapping[str, object], name: str) -> str | None:
    value = options.get(name)
    if value is not None and not isinstance(value, str):
        raise StateError(f"{name!r} must be a string, not a {type(value).__name__}")
    return value or None


def _check_names(what: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, 0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise StateError(f"unknown {what} {name!r}; {hint}Known are {', '.join(known)}")
