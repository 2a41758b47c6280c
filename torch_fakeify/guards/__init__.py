"""Conditions under which a graph may be used for arguments, and the values of sources in a scope."""
