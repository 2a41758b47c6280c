"""Torch's leaf objects to records and back: expressions, sources, contexts, values, subclasses."""
