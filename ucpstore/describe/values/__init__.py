"""Values of a state that are no tensors: objects with a state of their own, values per rank."""
