"""The unbacked symbols of a graph, preserved through retraces and passes."""
