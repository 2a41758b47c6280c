"""The HTML report of a capture."""
