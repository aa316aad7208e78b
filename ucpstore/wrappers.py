"""What wrappers of modules add to names, and the names of what a module holds without it.

Wrappers are known by type, along the module tree, so a submodule that happens to be called `module`
keeps its name. torch is never imported here: a type whose module was never imported cannot occur,
and importing torch._dynamo takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from ucpstore.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

EXTRA_STATE = "_extra_state"
"""Last part of the name of a module's extra state, as torch has it."""

# module that defines the wrapper, the wrapper's name, attribute that holds the wrapped module, and
# whether state_dict() shows the attribute in names
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


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether a value is a module of torch."""
    return _is(value, "torch.nn.modules.module", "Module")


def is_engine(value: object) -> bool:
    """Whether a value is a DeepSpeed engine, which is a module too."""
    return _is(value, "deepspeed.runtime.engine", "DeepSpeedEngine")


def unwrapped(module: nn.Module) -> tuple[nn.Module, str]:
    """The module inside of all wrappers, and the prefix that they add in state_dict()."""
    prefix = ""
    while True:
        for origin, kind, attribute, shown in _WRAPPERS:
            if _is(module, origin, kind):
                module = module._modules[attribute]  # type: ignore[assignment]
                prefix += f"{attribute}." if shown else ""
                break
        else:
            return module, prefix


def submodules(
    module: nn.Module, where: str, prefix: str = "", shown: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """A module and all inside of it, without wrappers, in the order of `state_dict()`.

    Each behind what the names of its tensors begin with, and what they begin with in state_dict()
    of the module as given. Parameters that FSDP2 has gathered are given back first, as
    `state_dict()` does. Raises UnsupportedError, naming `where`, for FSDP1.
    """
    module, added = unwrapped(module)
    shown += added
    _prepare(module, prefix, where)
    yield prefix, shown, module
    for name, child in module._modules.items():
        if child is not None:
            yield from submodules(child, where, f"{prefix}{name}.", f"{shown}{name}.")


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers that lie in the module itself, by their own names."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module has extra state of its own, as `get_extra_state()` gives it."""
    base: Any = sys.modules["torch.nn.modules.module"]
    own: object = type(module).get_extra_state
    return own is not base.Module.get_extra_state


def _prepare(module: nn.Module, prefix: str, where: str) -> None:
    origin = "torch.distributed.fsdp.fully_sharded_data_parallel"
    if _is(module, origin, "FullyShardedDataParallel"):
        name = f"{where}.{prefix}".rstrip(".")
        raise UnsupportedError(
            f"{name}: FullyShardedDataParallel (FSDP1) flattens parameters and loses their names; "
            "use torch.distributed.fsdp.fully_shard"
        )
    if _is(module, "torch.distributed.fsdp", "FSDPModule"):
        module.reshard()  # type: ignore[operator]


def _is(value: object, origin: str, kind: str) -> bool:
    known = getattr(sys.modules.get(origin), kind, None)
    return isinstance(known, type) and isinstance(value, known)
