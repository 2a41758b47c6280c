"""Functions that make a view, traced to records and replayed."""
