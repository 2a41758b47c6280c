"""Records to fake tensors."""
