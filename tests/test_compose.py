"""docker-compose.yml: what it offers, and that it agrees with itself. It is not started here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PATH = Path(__file__).resolve().parent.parent / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(PATH.read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
STORES = {"minio": 9000, "seaweedfs": 8333}


def test_every_image_is_pinned() -> None:
    for name, service in SERVICES.items():
        assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", service["image"]), name
        assert not service["image"].endswith("latest")


@pytest.mark.parametrize(("name", "port"), STORES.items())
def test_a_store_answers_on_loopback_and_keeps_its_data(name: str, port: int) -> None:
    service = SERVICES[name]
    assert f"127.0.0.1:{port}:{port}" in service["ports"]
    assert all(each.startswith("127.0.0.1:") for each in service["ports"])
    volumes = {each.split(":")[0] for each in service["volumes"]}
    assert volumes <= set(COMPOSE["volumes"])
    assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"])


@pytest.mark.parametrize(("name", "port"), STORES.items())
def test_a_bucket_is_made_once_its_store_is_healthy(name: str, port: int) -> None:
    maker = SERVICES[f"{name}-bucket"]
    assert maker["depends_on"] == {name: {"condition": "service_healthy"}}
    (script,) = maker["command"]
    assert f"http://{name}:{port} " in script
    assert "mb --ignore-existing store/ucpstore" in script
    assert "store/ucpstore" in maker["healthcheck"]["test"]  # so that `up --wait` waits for it
    assert maker.get("profiles") == SERVICES[name].get("profiles")


def test_minio_comes_by_default_and_seaweedfs_on_request() -> None:
    assert "profiles" not in SERVICES["minio"]
    assert SERVICES["seaweedfs"]["profiles"] == ["seaweedfs"]


def test_the_keys_in_the_comment_are_those_of_the_services() -> None:
    comment = PATH.read_text()
    key, secret = re.findall(r"AWS_(?:ACCESS_KEY_ID|SECRET_ACCESS_KEY)=(\S+)", comment)
    assert SERVICES["minio"]["environment"] == {
        "MINIO_ROOT_USER": key,
        "MINIO_ROOT_PASSWORD": secret,
    }
    assert f'"accessKey": "{key}", "secretKey": "{secret}"' in SERVICES["seaweedfs"]["command"][0]
