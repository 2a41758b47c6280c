"""Torch's private API: what is imported from it, the versions that are supported, the census."""
