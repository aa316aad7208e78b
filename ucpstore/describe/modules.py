"""Modules: their parameters, persistent buffers and extra state under fully qualified names.

The names are those of `module.state_dict()` without what wrappers add. Wrappers are known by
type, along the module tree, so a submodule that happens to be called `module` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ucpstore.errors import UnsupportedError

EXTRA_STATE = "_extra_state"
"""Last part of the name of a module's extra state, as torch has it."""

# module that defines the wrapper, the wrapper's name, attribute that holds the wrapped module, and
# whether state_dict() shows the attribute in names. Looked up in sys.modules: a wrapper whose
# module was never imported cannot occur, and importing torch._dynamo takes seconds.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module", True),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module", True),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", True),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        False,
    ),
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


def is_engine(value: object) -> bool:
    """Whether a value is a DeepSpeed engine, which is a module too."""
    engine = _loaded("deepspeed.runtime.engine", "DeepSpeedEngine")
    return engine is not None and isinstance(value, engine)


def unwrapped(module: nn.Module) -> tuple[nn.Module, str]:
    """The module inside of all wrappers, and the prefix that they add in state_dict()."""
    prefix = ""
    while True:
        for origin, kind, attribute, shown in _WRAPPERS:
            wrapper = _loaded(origin, kind)
            if wrapper is not None and isinstance(module, wrapper):
                module = module._modules[attribute]  # type: ignore[assignment]
                prefix += f"{attribute}." if shown else ""
                break
        else:
            return module, prefix


def entries(module: nn.Module, where: str) -> tuple[Entry, ...]:
    """All entries of a module in the order of `state_dict()`, tied parameters under every name.

    Parameters that FSDP2 has gathered are given back first, as `state_dict()` does. Raises
    UnsupportedError, naming `where`, for FSDP1 and for modules that rewrite their own state_dict.
    """
    found = tuple(_walk(module, "", "", where))
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


def parameter_names(module: nn.Module, where: str) -> dict[nn.Parameter, str]:
    """The first name of every parameter."""
    names: dict[nn.Parameter, str] = {}
    for entry in entries(module, where):
        if isinstance(entry.tensor, nn.Parameter):
            names.setdefault(entry.tensor, entry.name)
    return names


def _walk(module: nn.Module, prefix: str, shown: str, where: str) -> Iterator[Entry]:
    module, added = unwrapped(module)
    shown += added
    _prepare(module, prefix, where)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Entry(f"{prefix}{name}", f"{shown}{name}", parameter, None)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Entry(f"{prefix}{name}", f"{shown}{name}", buffer, None)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield Entry(f"{prefix}{EXTRA_STATE}", f"{shown}{EXTRA_STATE}", None, module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.", f"{shown}{name}.", where)


def _prepare(module: nn.Module, prefix: str, where: str) -> None:
    flat = _loaded("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    if flat is not None and isinstance(module, flat):
        name = f"{where}.{prefix}".rstrip(".")
        raise UnsupportedError(
            f"{name}: FullyShardedDataParallel (FSDP1) flattens parameters and loses their names; "
            "use torch.distributed.fsdp.fully_shard"
        )
    sharded = _loaded("torch.distributed.fsdp", "FSDPModule")
    if sharded is not None and isinstance(module, sharded):
        module.reshard()  # type: ignore[operator]


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


def _loaded(origin: str, kind: str) -> type | None:
    return getattr(sys.modules.get(origin), kind, None)
