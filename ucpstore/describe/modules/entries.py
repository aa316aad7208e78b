"""Modules: their parameters, persistent buffers and extra state under fully qualified names.

The names are those of `module.state_dict()` without what wrappers add; see `ucpstore.wrappers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ucpstore.errors import UnsupportedError
from ucpstore.wrappers import (
    EXTRA_STATE,
    has_extra_state,
    submodules,
    tensors_of,
    unwrapped,
)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One name of a module: a parameter, a persistent buffer, or a submodule's extra state.

    `shown` is the name as state_dict() of the module as given would have it. `layers` are, for what
    rules stack, all entries of the stack in rising order of index; the others are those of the
    first.
    """

    name: str
    shown: str
    tensor: torch.Tensor | None
    extra_of: nn.Module | None
    layers: tuple[Entry, ...] = ()


def entries(module: nn.Module, where: str) -> tuple[Entry, ...]:
    """All entries of a module in the order of `state_dict()`, tied parameters under every name.

    Parameters that FSDP2 has gathered are given back first, as `state_dict()` does. Raises
    UnsupportedError, naming `where`, for FSDP1 and for modules that rewrite their own state_dict.
    """
    found = tuple(_walk(module, where))
    for prefix, shown, inner in _customised(module):
        ours = [entry.shown for entry in found if entry.shown.startswith(shown)]
        theirs = [f"{shown}{name}" for name in inner.state_dict(keep_vars=True)]
        differing = sorted(set(ours) ^ set(theirs))
        if differing:
            raise UnsupportedError(
                f"{where}{'.' if prefix else ''}{prefix.rstrip('.')}: "
                f"{type(inner).__qualname__}.state_dict() does not hold the module's parameters "
                f"and persistent buffers; the names {differing[:5]} differ. Put its "
                "state_dict() into the state as a dict, or wrap it in an object with state_dict() "
                "and load_state_dict()"
            )
    return found


def parameters_of(module: nn.Module, where: str) -> dict[str, nn.Parameter]:
    """Every parameter, tied ones under every name."""
    found = ((entry.name, entry.tensor) for entry in entries(module, where))
    return {name: tensor for name, tensor in found if isinstance(tensor, nn.Parameter)}


def first_names(parameters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, str]:
    """The first name of every parameter."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(parameter, name)
    return names


def _walk(module: nn.Module, where: str) -> Iterator[Entry]:
    for prefix, shown, inner in submodules(module, where):
        for name, tensor in tensors_of(inner):
            yield Entry(f"{prefix}{name}", f"{shown}{name}", tensor, None)
        if has_extra_state(inner):
            yield Entry(f"{prefix}{EXTRA_STATE}", f"{shown}{EXTRA_STATE}", None, inner)


def _customised(
    module: nn.Module, prefix: str = "", shown: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """The outermost modules that may put other names into state_dict() than they hold."""
    module, added = unwrapped(module)
    shown += added
    kind = type(module)
    if (
        module._state_dict_hooks
        or kind.state_dict is not nn.Module.state_dict
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
    ):
        yield prefix, shown, module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _customised(child, f"{prefix}{name}.", f"{shown}{name}.")
