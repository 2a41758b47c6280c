"""Records as text: ``show``, ``diff``, privacy."""
