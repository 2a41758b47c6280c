"""Real inputs for a frame: sizes and data with which its guards and asserts hold."""
