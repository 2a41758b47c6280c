"""One frame of ``torch.compile``: recorded, saved, instantiated, compiled."""
