"""The state of a ``ShapeEnv``: as a record (snapshot, restore) and in place (checkpoint, rollback)."""
