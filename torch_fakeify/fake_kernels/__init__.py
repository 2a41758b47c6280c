"""Fake kernels that are inferred from calls of an operator: observed calls, formulas that fit, source."""
