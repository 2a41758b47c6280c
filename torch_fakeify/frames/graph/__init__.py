"""FX graphs to records and back."""
