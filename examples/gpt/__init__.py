"""A small GPT and its parallelism, written by hand.

`parallel.py` has the arrangements and what ranks tell each other, `model.py` the network, `data.py`
its text, `zero.py` the optimizer, `train.py` one training step over all ranks, and `checkpoint.py`
what a user of ucpstore writes: the state, and the rules that say how it lies over the ranks.
"""
