"""Modules: what they hold, and under which names."""
