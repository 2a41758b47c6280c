"""Records to bytes and files, and back."""
