from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from ucpstore.errors import StateError, StorageError
from ucpstore.storage.s3_options import S3Options


@pytest.fixture(autouse=True)
def environment(
    no_aws_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> pytest.MonkeyPatch:
    """No AWS settings but those that the test makes, in `credentials` and `config`."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=file-key\naws_secret_access_key=file-secret\n"
        "[other]\naws_access_key_id=other-key\naws_secret_access_key=other-secret\n"
        "aws_session_token=other-token\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion=eu-west-1\n"
        "[profile other]\nregion=eu-north-1\nendpoint_url=http://profile\nservices=mine\n"
        "[profile plain]\nendpoint_url=http://plain\n"
        "[services mine]\ns3 =\n  endpoint_url=http://profile-s3\n"
    )
    return monkeypatch


def credentials(**options: object) -> tuple[object, ...]:
    provider = S3Options.parse(options).resolve().provider
    assert provider is not None
    return tuple(provider().values())


def test_arguments_win_and_stand_alone(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_ACCESS_KEY_ID", "env-key")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    environment.setenv("AWS_SESSION_TOKEN", "env-token")
    assert credentials(key="k", secret="s") == ("k", "s", None, None)
    assert credentials(key="k", secret="s", token="t") == ("k", "s", "t", None)
    assert credentials() == ("env-key", "env-secret", "env-token", None)
    assert credentials(profile="other") == ("other-key", "other-secret", "other-token", None)


def test_profiles(environment: pytest.MonkeyPatch) -> None:
    assert credentials() == ("file-key", "file-secret", None, None)
    environment.setenv("AWS_PROFILE", "other")
    assert credentials() == ("other-key", "other-secret", "other-token", None)
    with pytest.raises(StorageError, match=r"nope.*correct the profile"):
        credentials(profile="nope")


def test_no_credentials_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "credentials").unlink()
    with pytest.raises(StorageError, match=r"no S3 credentials found.*AWS_ACCESS_KEY_ID.*anon"):
        credentials()
    assert S3Options.parse({"anon": True}).resolve().provider is None


def test_regions(environment: pytest.MonkeyPatch) -> None:
    def region(**options: object) -> str:
        return S3Options.parse({"anon": True, **options}).resolve().region

    assert region() == "eu-west-1"
    environment.setenv("AWS_DEFAULT_REGION", "us-east-2")
    assert region() == "us-east-2"
    environment.setenv("AWS_REGION", "us-west-2")
    assert region() == "us-west-2"
    assert region(client_kwargs={"region_name": "ap-east-1"}) == "ap-east-1"


def test_endpoints(environment: pytest.MonkeyPatch) -> None:
    def endpoint(**options: object) -> str | None:
        return S3Options.parse(options).resolve().endpoint

    assert endpoint() is None
    assert endpoint(profile="other") == "http://profile-s3"
    environment.setenv("AWS_ENDPOINT_URL", "https://env/")
    assert endpoint(profile="other") == "https://env"
    environment.setenv("AWS_ENDPOINT_URL_S3", "https://env-s3")
    assert endpoint() == "https://env-s3"
    assert endpoint(endpoint_url="http://a") == "http://a"
    assert endpoint(client_kwargs={"endpoint_url": "http://b"}) == "http://b"
    environment.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert endpoint() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"secrt": "x"}, "unknown storage option 'secrt'; did you mean 'secret'?"),
        ({"endpoint": "x"}, "did you mean 'endpoint_url'?"),
        ({"zzz": 1}, "unknown storage option 'zzz'; Known are key, secret, token"),
        ({"client_kwargs": {"region": "x"}}, "did you mean 'region_name'?"),
        ({"client_kwargs": "x"}, "must be a dict"),
        ({"key": "k"}, "belong together"),
        ({"token": "t"}, "belong together"),
        ({"key": 1, "secret": "s"}, "'key' must be a string"),
        ({"anon": "yes"}, "True or False"),
        ({"anon": True, "key": "k", "secret": "s"}, "excludes"),
        ({"endpoint_url": "localhost:9000"}, "must start with http"),
        ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, "give one"),
    ],
)
def test_what_is_not_understood_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(StateError) as caught:
        S3Options.parse(options)
    assert words in str(caught.value)


def test_secrets_are_not_shown() -> None:
    shown = repr(S3Options.parse({"key": "k", "secret": "hide-me", "token": "hide-me-too"}))
    assert "hide" not in shown


def test_credentials_that_expire_are_asked_for_again(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A credential_process stands for every source that botocore renews."""
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    (tmp_path / "answer").write_text(
        '{"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "q", "SessionToken": "r", '
        f'"Expiration": "{until.isoformat()}"}}'
    )
    (tmp_path / "config").write_text(
        f"[profile process]\ncredential_process=cat {tmp_path / 'answer'}\n"
    )
    *known, expires = credentials(profile="process")
    assert known == ["p", "q", "r"]
    assert isinstance(expires, datetime.datetime)
    assert expires < until - datetime.timedelta(minutes=30)
