"""Record types of tensors, graphs, frames and ``ShapeEnv``s, and passes over records alone."""
