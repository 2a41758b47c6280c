"""Tensors to records."""
