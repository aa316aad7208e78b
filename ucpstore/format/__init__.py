"""The stored form: keys, documents and records as bytes and JSON. Pure: no I/O, no torch."""
