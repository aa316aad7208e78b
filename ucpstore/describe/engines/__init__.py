"""Live engines of other frameworks as dicts of what they are made of."""
