"""Guards and runtime asserts of a ``ShapeEnv`` as FX nodes, and from there into another one."""
