"""Transfer of fake tensors, facts and graphs to another ``ShapeEnv``."""
