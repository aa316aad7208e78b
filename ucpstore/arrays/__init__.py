"""Arrays as they are stored: metadata, chunks and checksums. Only this package knows zarr.

Nothing is imported here: zarr loads `zdtypes` in processes that use no other part of ucpstore.
"""
