"""Heartbeats move while a call lasts, cost short calls nothing, and show who stands still."""

from __future__ import annotations

import time

from ucpstore.agree.heart import Heart, Watch, interval_s
from ucpstore.agree.keyvalue import DictStore


def test_several_beats_fit_into_the_silence_limit() -> None:
    assert interval_s(60.0) == 5.0
    assert interval_s(3.0) == 0.5


def test_a_counter_moves_until_it_is_stopped_and_goes() -> None:
    store = DictStore()
    heart = Heart(store)
    heart.start("b", silence_timeout_s=0.3)
    time.sleep(0.5)
    assert 3 <= int(store.get("b") or 0) <= 11
    heart.stop("b")
    assert store.num_keys() == 0
    time.sleep(0.2)
    assert store.num_keys() == 0


def test_within_the_first_second_nothing_is_written() -> None:
    store = DictStore()
    heart = Heart(store)
    heart.start("b", silence_timeout_s=60)
    time.sleep(0.3)
    assert store.num_keys() == 0
    heart.stop("b")


def test_a_watch_tells_who_stands_still() -> None:
    store = DictStore()
    watch = Watch(store, silence_timeout_s=0.2)
    deadline = time.monotonic() + 0.35
    while time.monotonic() < deadline:
        store.add("alive", 1)
        assert "alive" not in watch.silent(["alive", "dead"])
        time.sleep(0.02)
    assert watch.silent(["alive", "dead"]) == ["dead"]
    store.add("dead", 1)
    assert watch.silent(["alive", "dead"]) == []
