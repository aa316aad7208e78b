"""Faces of other frameworks' habits over `ucpstore.save` and `ucpstore.load`."""
