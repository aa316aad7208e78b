"""States of an optimizer that are made anew, of a dtype that it cannot step with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from ucpstore.describe.place import Place


@dataclass(frozen=True, slots=True, eq=False)
class Narrow:
    """Collects such states of one optimizer, to tell of all at once."""

    place: Place
    _found: dict[str, list[str]] = field(default_factory=dict)

    def note(self, key: str, dtype: torch.dtype, parameter: torch.Tensor) -> None:
        """A state made anew that has the shape of its parameter."""
        if dtype.is_floating_point and dtype.itemsize < parameter.itemsize:
            self._found.setdefault(str(dtype), []).append(f"{self.place.shown}.{key}")

    def warn(self) -> None:
        """Tell of those noted, if any."""
        for dtype, names in self._found.items():
            patterns = ", ".join(dict.fromkeys(repr(f"{name}.*") for name in names))
            warnings.warn(
                f"{self.place.shown}: the optimizer has no states yet, and {len(names)} of those "
                f"it gets are of {dtype}, as stored, narrower than their parameters; most "
                "optimizers cannot step so. Pass "
                f"cast=[{patterns}] to the load for states as wide as the parameters",
                stacklevel=2,
            )
