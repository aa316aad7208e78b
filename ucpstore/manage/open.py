"""Open a step lazily: names and shapes from its documents, values only when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ucpstore import catalog
from ucpstore.arrays.metadata import ArrayMetadata, parse
from ucpstore.catalog import StepRef
from ucpstore.describe import Read, View
from ucpstore.dtypes import to_torch
from ucpstore.errors import CorruptError
from ucpstore.format import layout
from ucpstore.geometry import Box, Piece
from ucpstore.loading.reader import Reader
from ucpstore.loading.requests import Requests
from ucpstore.manage.index import Selection, select
from ucpstore.options import Options
from ucpstore.storage import Storage
from ucpstore.tree import Node, inline
from ucpstore.tree.decode import decode
from ucpstore.tree.names import array_names, top_level

if TYPE_CHECKING:
    import torch


class StoredArray:
    """One array of a step. Indexing reads the chunks of that slice, nothing more."""

    def __init__(self, checkpoint: Checkpoint, path: str, stored: ArrayMetadata) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._grid = stored.grid
        self._dtype = stored.dtype
        self.path = path
        """Path below the step's folder."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._grid.shape

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of a chunk, the unit of reading."""
        return self._grid.chunk

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return to_torch(self._dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<StoredArray {self.path} {self._dtype} {self.shape}>"

    def __getitem__(self, index: object) -> torch.Tensor:
        """The values at integers, slices and `...`, as a new CPU tensor."""
        return self._read(select(index, self.shape, self.path), None)

    def read(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The whole array as a new tensor, on the CPU where `device` is None."""
        return self._read(select(..., self.shape, self.path), device)

    def _read(self, selection: Selection, device: torch.device | str | None) -> torch.Tensor:
        import torch

        box = selection.box
        tensor = torch.empty(box.shape, dtype=self.dtype, device=device)
        self._checkpoint._fill([self._target(tensor, box)])
        return tensor[selection.within]

    def _target(self, tensor: torch.Tensor, box: Box) -> tuple[Read, ArrayMetadata]:
        pieces = (Piece(box, Box.whole(box.shape)),) if box.size else ()
        return Read(self.path, (View(tensor, pieces),), self._dtype), self._stored


class Item(Mapping[str, StoredArray]):
    """The arrays of one item by name: FQNs for a module, `exp_avg/<FQN>` for an optimizer."""

    def __init__(self, checkpoint: Checkpoint, arrays: Mapping[str, StoredArray]) -> None:
        self._checkpoint = checkpoint
        self._arrays = arrays

    def __getitem__(self, name: str) -> StoredArray:
        try:
            return self._arrays[name]
        except KeyError:
            near = [other for other in self._arrays if name in other or other in name][:5]
            hint = f"; there is {', '.join(near)}" if near else ""
            raise KeyError(f"no array {name!r} among {len(self._arrays)}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<Item of {len(self)} arrays>"

    def read(
        self, names: Iterable[str] | None = None, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """The named arrays (all where None) as new tensors, read together."""
        import torch

        wanted = list(self) if names is None else list(names)
        tensors = {}
        targets = []
        for name in wanted:
            array = self[name]
            tensors[name] = torch.empty(array.shape, dtype=array.dtype, device=device)
            targets.append(array._target(tensors[name], Box.whole(array.shape)))
        self._checkpoint._fill(targets)
        return tensors


class Checkpoint(Mapping[str, "Item | StoredArray"]):
    """A committed step: its items by name. Made by `CheckpointStore.open`.

    Opening reads the commit record and the step's tree, an item's document is read when the item
    is first asked for, and values when an array is indexed.
    """

    def __init__(self, storage: Storage, ref: StepRef, options: Options) -> None:
        self._storage = storage
        self._ref = ref
        self._options = options
        document = catalog.read_step_group(storage, ref)
        self._nodes: dict[str, Node] = top_level(document.tree)
        self._root_arrays = document.root_arrays
        self._known: dict[str, Mapping[str, Mapping[str, object]]] = {}

    @property
    def step(self) -> int:
        """The training step."""
        return self._ref.record.step

    @property
    def metadata(self) -> object:
        """What `save` was given as `metadata`."""
        return self._ref.record.metadata

    @property
    def path(self) -> str:
        """The step's folder below the store's URL; a plain Zarr group."""
        return self._ref.path

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"<Checkpoint of step {self.step} in {self._storage.url}: {', '.join(self)}>"

    def __getitem__(self, name: str) -> Item | StoredArray:
        """The arrays of an item, or the array where the item is a tensor.

        An item without arrays is an empty mapping; `value` gives what it holds.
        """
        node = self._node(name)
        found = {inner: self._array(path) for inner, path in array_names(node).items()}
        if list(found) == [""]:
            return found[""]
        return Item(self, found)

    def value(self, name: str) -> object:
        """The item as plain Python values, with None in the place of every array.

        KeyError where the item itself is an array.
        """
        if list(array_names(self._node(name))) == [""]:
            raise KeyError(f"{name!r} is an array; take [{name!r}], and [{name!r}].read() of it")
        return decode(inline(self._node(name), self._large), lambda tag, body: None)

    def _node(self, name: str) -> Node:
        try:
            return self._nodes[name]
        except KeyError:
            raise KeyError(
                f"step {self.step} has no item {name!r}; it has {', '.join(self) or 'none'}"
            ) from None

    def _array(self, path: str) -> StoredArray:
        return StoredArray(self, path, self._metadata(path))

    def _metadata(self, path: str) -> ArrayMetadata:
        documents = self._documents(path)
        try:
            return parse(documents[path], path)
        except KeyError:
            raise CorruptError(
                f"{path}: the tree of step {self.step} names this array, but the document of its "
                "item does not; run `ucpstore verify`"
            ) from None

    def _documents(self, path: str) -> Mapping[str, Mapping[str, object]]:
        """The metadata of all arrays that lie in the same item as `path`, by path."""
        item, _, inner = path.partition("/")
        if not inner:
            return self._root_arrays
        if item not in self._known:
            self._known[item] = catalog.read_items(
                self._storage, self._ref, catalog.item_entries(self._ref, {item})
            )
        return self._known[item]

    def _large(self, path: str) -> bytes:
        """The contents of an array of bytes that holds a large leaf of the tree."""
        return catalog.read_bytes(self._storage, self._ref, path, self._metadata(path))

    def _fill(self, targets: Iterable[tuple[Read, ArrayMetadata]]) -> None:
        requests = Requests()
        todo = [request for read, array in targets for request in requests.of(read, array)]
        if todo:
            Reader(self._storage, self._ref, self._options).run(todo)


def open_step(storage: Storage, step: int | None, options: Options) -> Checkpoint:
    """Open a committed step, the newest where `step` is None."""
    number = None if step is None else layout.check_step(step)
    return Checkpoint(storage, catalog.find_step(storage, number), options)
