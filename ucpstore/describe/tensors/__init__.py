"""Tensors of every kind as one rank holds them: plain, DTensor, of numpy, in rows, in stacks."""
