"""States that are made narrower than an optimizer can step with."""

from __future__ import annotations

import pytest
import torch
from describe.engine import load, save
from torch import nn


def test_states_that_are_narrower_than_their_parameter_are_told():
    def job(dtype: torch.dtype | None) -> dict[str, object]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(net.parameters())
        for parameter in net.parameters() if dtype is not None else ():
            moment = torch.ones_like(parameter, dtype=dtype)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment}
        return {"model": net, "optim": optimizer}

    narrow = save(job(torch.bfloat16))
    with pytest.warns(UserWarning) as caught:
        load(job(None), narrow)
    assert [str(each.message) for each in caught] == [
        "optim: the optimizer has no states yet, and 2 of those it gets are of torch.bfloat16, as "
        "stored, narrower than their parameters; most optimizers cannot step so. Pass "
        "cast=['optim.exp_avg.*'] to the load for states as wide as the parameters"
    ]
    # without a warning, which would be an error
    load(job(None), narrow, cast=["optim.exp_avg.*"])
    load(job(torch.bfloat16), narrow)
    load(job(None), save(job(torch.float64)))
