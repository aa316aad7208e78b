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

_NAMES = (
    "key",
    "secret",
    "token",
    "anon",
    "endpoint_url",
    "profile",
    "client_kwargs",
    "config_kwargs",
    "requester_pays",
    "use_ssl",
    "username",
    "password",
    "engine",
)
# Of s3fs, and without a meaning here: how files are buffered, and what is kept between calls.
_NO_EFFECT = (
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "max_concurrency",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
)
_CLIENT_NAMES = (
    "endpoint_url",
    "region_name",
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "use_ssl",
)
_CONFIG_NAMES = ("s3", "region_name")
_STYLES = ("auto", "path", "virtual")
_ENGINES = ("obstore", "s3fs")
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
    style: str = "auto"
    requester_pays: bool = False
    engine: str = "obstore"

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> S3Options:
        """From `storage_options`; raises StateError naming the option that is not understood."""
        _check_names("storage option", options, _NAMES, _NO_EFFECT)
        client = _inner(options, "client_kwargs", _CLIENT_NAMES)
        config = _inner(options, "config_kwargs", _CONFIG_NAMES)
        s3 = _inner(config, "s3", ("addressing_style",), "config_kwargs['s3'] entry")
        given = cls(
            _one("key", options, "key", options, "username", client, "aws_access_key_id"),
            _one("secret", options, "secret", options, "password", client, "aws_secret_access_key"),
            _one("token", options, "token", client, "aws_session_token"),
            _truth(options, "anon"),
            _endpoint(
                _one("endpoint", options, "endpoint_url", client, "endpoint_url", show=True),
                _truth(client, "use_ssl", _truth(options, "use_ssl", True)),
            ),
            _one("region", client, "region_name", config, "region_name", show=True),
            _text(options, "profile"),
            _choice(s3, "addressing_style", _STYLES),
            _truth(options, "requester_pays"),
            _choice(options, "engine", _ENGINES),
        )
        if (given.key is None) != (given.secret is None) or (given.token and not given.key):
            raise StateError("storage options 'key' and 'secret' (and 'token') belong together")
        if given.anon and (given.key or given.profile):
            raise StateError("storage option 'anon' excludes 'key' and 'profile'; give one of them")
        return given

    @staticmethod
    def knows(name: str) -> bool:
        """Whether `name` is the name of an option."""
        return name in _NAMES or name in _NO_EFFECT

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
            provider = self._provider(session)
            return Resolved(endpoint, region, provider, self.style, self.requester_pays)
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
    style: str = "auto"
    requester_pays: bool = False

    def virtual_hosted(self, bucket: str) -> bool:
        """Whether the bucket is part of the host's name: at Amazon, unless it has a dot."""
        if self.style != "auto":
            return self.style == "virtual"
        return self.endpoint is None and "." not in bucket


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


def _endpoint(url: str | None, ssl: bool = True) -> str | None:
    if url is None:
        return None
    if "://" not in url and not ssl:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise StateError(f"endpoint {_hide_user(url)!r} must start with http:// or https://")
    if "@" in url.split("/")[2]:
        raise StateError(
            f"credentials do not belong into an endpoint ({_hide_user(url)}); give the storage "
            "options key and secret"
        )
    return url.rstrip("/")


def _hide_user(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _one(what: str, *places: object, show: bool = False) -> str | None:
    """The text that is given under one of several names: options and names in turn."""
    pairs = zip(places[::2], places[1::2], strict=True)
    given = {text for each, name in pairs if (text := _text(each, name))}  # type: ignore[arg-type]
    if len(given) > 1:
        values = f", {' and '.join(sorted(map(_hide_user, given)))}" if show else ""
        raise StateError(f"two {what}s are given{values}; give one")
    return given.pop() if given else None


def _text(options: Mapping[str, object], name: str) -> str | None:
    value = options.get(name)
    if value is not None and not isinstance(value, str):
        raise StateError(f"{name!r} must be a string, not a {type(value).__name__}")
    return value or None


def _truth(options: Mapping[str, object], name: str, default: bool = False) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise StateError(f"storage option {name!r} must be True or False, not {value!r}")
    return value


def _choice(options: Mapping[str, object], name: str, known: tuple[str, ...]) -> str:
    """One of `known`, the first of which is the default."""
    value = options.get(name)
    if value is None:
        return known[0]
    if value not in known:
        raise StateError(f"{name!r} must be one of {', '.join(known)}, not {value!r}")
    return str(value)


def _inner(
    options: Mapping[str, object], name: str, known: tuple[str, ...], what: str = ""
) -> Mapping[str, object]:
    inner = options.get(name) or {}
    if not isinstance(inner, Mapping):
        raise StateError(f"storage option {name!r} must be a dict")
    _check_names(what or f"{name} entry", inner, known)
    return inner


def _check_names(
    what: str, given: Mapping[str, object], known: tuple[str, ...], more: tuple[str, ...] = ()
) -> None:
    for name in given:
        if name not in known and name not in more:
            near = difflib.get_close_matches(str(name), known, 1, 0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise StateError(f"unknown {what} {name!r}; {hint}Known are {', '.join(known)}")
