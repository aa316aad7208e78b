"""Groups: who takes part in a call, and the key-value store that they share."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING

from ucpstore.agree.call import Call
from ucpstore.agree.heart import Heart
from ucpstore.agree.keyvalue import C10dStore, DictStore, KeyValue
from ucpstore.errors import AgreementError
from ucpstore.options import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PREFIX = "ucpstore"
_NO_MEMBER = (
    "this process is not a member of the process group it was given; call it on the members only"
)


class Group:
    """One rank's membership in a set of ranks that save and load together.

    `rank` counts within the group; `global_ranks[r]` is the number that torch's default group
    gives to rank r. Made by `group_of` and `local_group`.
    """

    def __init__(
        self, rank: int, global_ranks: tuple[int, ...], store: KeyValue, *, lone: bool = False
    ) -> None:
        self.rank = rank
        self.size = len(global_ranks)
        self.global_ranks = global_ranks
        self.store = store
        self.distributed = not lone
        """Whether a process group stands behind it; False for a process on its own."""
        self.heart = Heart(store)
        self.opening = threading.Lock()
        """Held while a call looks for its ranks: two that open at once could be mixed up."""
        self.attended: list[str] = []
        """Ids of the latest calls that this rank took part in."""
        self.unread: list[tuple[str, int]] = []
        """On rank 0, calls that ended with keys left, and the number of rounds to remove."""
        self.exchanger: tuple[str, object] | None = None
        """The exchange in use and its name, kept by `ucpstore.exchange`."""

    @property
    def one_process(self) -> bool:
        """Whether all ranks are threads of this process."""
        return isinstance(self.store, DictStore)

    def call(self, kind: str, options: Options) -> Call:
        """Begin a collective call of `kind`, the verb that messages show: "save" or "load".

        Every rank of the group must open its calls in the same order. Of two calls that threads
        of one rank open at once, the second waits until the ranks of the first have met.
        """
        return Call(self, kind, options)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"


def local_group(size: int) -> tuple[Group, ...]:
    """`size` groups that share a dict: the ranks are threads of this process."""
    store = DictStore()
    return tuple(Group(rank, tuple(range(size)), store) for rank in range(size))


_known: weakref.WeakKeyDictionary[ProcessGroup, Group] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


def group_of(process_group: ProcessGroup | Group | None = None) -> Group:
    """The group behind `process_group`; a `Group` is returned as it is.

    None means torch's default group where one is initialised, whatever the environment says, and
    otherwise this process alone. The first use of a process group opens one more connection to
    its store. Raises `AgreementError` where this process is no member, or the process group has
    no key-value store.
    """
    if isinstance(process_group, Group):
        return process_group
    # Who has not imported torch.distributed has no process group; importing it takes seconds.
    dist = sys.modules.get("torch.distributed")
    initialised = dist is not None and dist.is_available() and dist.is_initialized()
    if process_group is None:
        if dist is None or not initialised:
            return Group(0, (0,), DictStore(), lone=True)
        process_group = dist.group.WORLD
    return _distributed(process_group)


def _distributed(process_group: object) -> Group:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise AgreementError(_NO_MEMBER)
    if not isinstance(process_group, dist.ProcessGroup):
        raise AgreementError(
            f"process_group must be a torch process group, but it is a "
            f"{type(process_group).__name__}; of a DeviceMesh, pass mesh.get_group()"
        )
    # Of a group that was destroyed nothing is known, and the lookups raise one of these.
    try:
        rank = dist.get_rank(process_group)
        global_ranks = tuple(dist.get_process_group_ranks(process_group))
        store = c10d._get_process_group_store(process_group)
    except (KeyError, ValueError, RuntimeError) as error:
        raise AgreementError(
            "the process group is not initialised, or was destroyed; pass one that is in use"
        ) from error
    if rank < 0:
        raise AgreementError(_NO_MEMBER)
    with _known_lock:
        group = _known.get(process_group)
        if group is None:
            group = Group(rank, global_ranks, _key_value(process_group, store))
            _known[process_group] = group
        return group


def _key_value(process_group: ProcessGroup, store: object) -> KeyValue:
    from torch._C._distributed_c10d import Store

    if isinstance(store, Store):
        try:
            return C10dStore(store, _PREFIX)
        except RuntimeError:  # a store that exists in name only cannot be cloned
            pass
    raise AgreementError(
        f"the process group (backend {process_group.name()}) has no key-value store through "
        "which its ranks could agree; initialise torch.distributed with a TCPStore, as torchrun "
        'does, with backend "gloo" or "nccl", or pass such a group as process_group'
    )
