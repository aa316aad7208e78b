"""Optimizers: what they hold by name, be it parameters, copies of them or rows."""
