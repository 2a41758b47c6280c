"""Benchmarks: torch's own code and ours alternately in one process; ratios, no timed tests."""
