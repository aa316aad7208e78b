"""Agreement: ranks tell each other arrival, outcome or failure through a key-value store.

`group_of` turns a process group into a `Group`, `Group.call` opens a `Call`, and `Call.round` lets
every rank give bytes, rank 0 decide, and all return the decision or all raise the first failure.
No collective is used, so nothing here can hang a running job or be hung by it.
"""

from ucpstore.agree.call import Call
from ucpstore.agree.group import Group, group_of, local_group
from ucpstore.agree.keyvalue import DictStore, KeyValue

__all__ = ["Call", "DictStore", "Group", "KeyValue", "group_of", "local_group"]
