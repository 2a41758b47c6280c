"""The places of torch that the drop-in puts something of ours into, by name.

`dropin` itself finds the holders of torch's classes by looking; this is the list to look for them without
it: whether a torch has each of these places. A test holds it against what the drop-in replaces.
"""

from __future__ import annotations

__all__ = ["DROPIN_SITES"]

_UTILS = "torch._subclasses.meta_utils"

DROPIN_SITES = (
    f"{_UTILS}.MetaConverter",
    f"{_UTILS}.MetaStorageDesc",
    f"{_UTILS}.MetaTensorDesc",
    f"{_UTILS}.MetaTensorDescriber",
    "torch._subclasses.fake_tensor.MetaConverter",
    "torch.fx._graph_pickler.MetaConverter",
    "torch.fx._graph_pickler.MetaTensorDesc",
    "torch.fx._graph_pickler.MetaTensorDescriber",
    "torch.fx.experimental.symbolic_shapes.uninteresting_files",
    "torch._dynamo.trace_rules.SKIP_DIRS",
    "torch._dynamo.trace_rules._recompile_re",
)
"""Dotted names: the classes that are replaced, and the lists that get our files and our folder."""
