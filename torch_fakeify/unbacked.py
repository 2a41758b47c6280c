"""Unbacked symbols of a graph: where they are bound, through retraces and passes.

`retrace` runs a graph in a fresh ``ShapeEnv`` and says which symbol has become which; `repropagate`
brings the values of a graph up to date after a pass; `transplant` is what a pass calls that replaces
a node which binds symbols; `check_bindings` finds the pass that did not.
"""

from __future__ import annotations

from .binding_checks import BindingFault, binding_faults, check_bindings
from .binding_sites import Binding, find_bindings, is_flag, is_unbacked, renamed
from .repropagations import repropagate
from .retraces import Retraced, retrace
from .transplants import Transplanted, transplant

__all__ = [
    "Binding",
    "BindingFault",
    "Retraced",
    "Transplanted",
    "binding_faults",
    "check_bindings",
    "find_bindings",
    "is_flag",
    "is_unbacked",
    "renamed",
    "repropagate",
    "retrace",
    "transplant",
]
