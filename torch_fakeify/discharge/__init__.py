"""Conditions that follow from what a ``ShapeEnv`` knows: questions, and answers where torch has none."""
