"""A smaller capture that fails in the same way, and a script of it."""
