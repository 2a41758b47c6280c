"""Torch's private parts of ``torch.export``: verifiers and the module that checks guards."""

from __future__ import annotations

from typing import Any

from . import gate

gate.check_installed_torch()  # before anything private is asked for

from torch._export.verifier import Verifier, load_verifier


def verifier_of(dialect: str) -> type[Verifier] | None:
    """Return the verifier of a dialect; ``None`` if no library that is imported defines it."""
    try:
        return load_verifier(dialect)
    except KeyError:
        return None


def guard_calls(gm: Any) -> list[Any]:
    """Return the nodes of ``ExportedProgram.module()`` that check its guards: calls of a ``GuardsFn``."""
    found = [n for n in gm.graph.find_nodes(op="call_module") if n.target == "_guards_fn"]
    # Not imported by name: torch 2.13 has the class in a private module that moved before.
    kinds = {type(gm.get_submodule(n.target)).__name__ for n in found}
    return found if kinds == {"GuardsFn"} else []
