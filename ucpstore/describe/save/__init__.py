"""The save side: a state to arrays, a typed tree and documents per rank."""
