"""Entailment between conditions on shape symbols: linear and polynomial integer arithmetic."""
