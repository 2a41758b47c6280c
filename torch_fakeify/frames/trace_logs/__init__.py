"""Captures from the structured trace logs of torch."""
