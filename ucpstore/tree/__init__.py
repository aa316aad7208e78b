"""The state tree as typed JSON: everything of a state but the values of its arrays. Pure."""
