"""The load side: a target checked against a stored tree."""
