"""How many requests a reader sends at once."""

from __future__ import annotations

import pytest
import torch
from services.faults import FaultyStorage
from services.steps import saved

from ucpstore.agree import group_of
from ucpstore.crew import Crew
from ucpstore.loading import LoadRequest, load_state, reader
from ucpstore.options import Options
from ucpstore.storage.memory import MemoryStorage


@pytest.mark.parametrize(("threads", "used"), [(None, 5), (2, 2)])
def test_the_storage_says_how_many_unless_the_user_does(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, used: int
) -> None:
    monkeypatch.setattr(FaultyStorage, "requests", 5)
    storage = FaultyStorage(MemoryStorage())
    state = {"m": {str(number): torch.ones(3) for number in range(9)}}
    saved(storage, state)
    asked: list[int] = []

    class Counting(Crew):
        def __init__(self, most: int, name: str) -> None:
            asked.append(most)
            super().__init__(most, name)

    monkeypatch.setattr(reader, "Crew", Counting)
    options = Options(threads=threads)
    load_state(storage, group_of(None), lambda: LoadRequest.checked(state, 1, True, None), options)
    assert asked == [used]
