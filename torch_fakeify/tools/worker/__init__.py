"""The processes in which captures are compiled and run."""
