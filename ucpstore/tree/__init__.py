"""The state tree as typed JSON: everything of a state but the values of its arrays. Pure."""

from ucpstore.tree.documents import externalize, inline
from ucpstore.tree.merge import merge as merge_nodes
from ucpstore.tree.nodes import Node, walk

__all__ = ["Node", "externalize", "inline", "merge_nodes", "walk"]
