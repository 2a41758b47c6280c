"""The demo: a model recorded here, replayed elsewhere."""
