"""Names of torch that the drop-in replaces or modifies.

`dropin` searches for references to torch's classes. This list serves to check a torch without that; a
test compares it with what the drop-in replaces.
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
"""Dotted names: replaced classes, and lists to which files and folders of this package are added."""
