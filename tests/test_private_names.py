"""What ``_torch.py`` needs of torch, read from a source, and what of it is gone."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

import pytest
import torch

from torch_fakeify.private_names import GoneError, find, gone_names, private_names, used_names

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = '''
"""torch.docs"""
import math, torch, torch._m
import torch._n.o as o
from torch._a import b, c as d
from .errors import torch_free
if TYPE_CHECKING:
    from torch._typing import T
try:
    from torch._maybe import f
except ImportError:
    f = None
x: Any = torch._C
y = x._g.h(o.p, q=d.r)
if hasattr(x, "_i"):
    z = x._i.j
w = getattr(x, "_k", None)
v = x._k.l if w else [e for e in torch._s.t]
t = getattr(x, "t1", None) or x.t2
u = x.u if hasattr(x, "u1") else None
LISTED = "math torch.v torch._w.x"
for name in LISTED.split():
    import_module(name)
TOLD = "there is no torch.told here"

class K(NamedTuple):
    a: torch._annotated

@torch._decorated
def function(torch, d, e=b.s, *, k=x.kw):
    """torch.docs"""
    torch.argument, d.argument
    from torch._y import z
    inner = z.one
    inner.two = 3
    inner = 4
    inner.three
    return import_module("torch._late").name, import_module("math")

def other(n):
    match n:
        case "torch._z.Case":
            return x.later
    with x.entered as e, suppress(ValueError):
        del x.deleted
'''

NEEDED = """
torch._C torch._C._g.h torch._C.deleted torch._C.entered torch._C.kw torch._C.later torch._a.b
torch._a.b.s torch._a.c torch._a.c.r torch._decorated torch._late.name torch._m torch._n.o
torch._n.o.p torch._s.t torch._w.x torch.v torch._y.z torch._y.z.one torch._y.z.one.two torch._z.Case
"""


def test_what_a_source_needs() -> None:
    """Imports and attributes, at module level and in functions; not what it asks for first, nor text."""
    assert sorted(used_names(SOURCE)) == sorted(NEEDED.split())


def test_what_the_room_needs() -> None:
    """Names of each kind of use are found in the package's own source, and all of them are here."""
    names = set(private_names())
    assert {
        "torch._guards.SLoc",
        "torch.fx.graph._PyTreeInfo",
        "torch._C._functorch._add_batch_dim",
        "torch._dynamo.source",
        "torch._dynamo.exc.SkipFrame",
        "torch.nested._internal.nested_tensor._tensor_id_counter",
    } <= names
    assert gone_names(names) == []


def test_what_is_gone_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in something that is gone has none of its own; a module that fails says how."""
    broken = types.ModuleType("torch._broken")
    monkeypatch.setitem(sys.modules, "torch._halted", None)
    monkeypatch.setitem(sys.modules, "torch._broken", broken)
    names = [
        "torch._halted.a",
        "torch._broken.a",
        "torch._nope.a",
        "torch._nope.b",
        "torch._C._nope.x",
    ]
    assert gone_names([*names, "torch.Tensor"]) == [
        "torch._halted: a name that is gone",
        "torch._broken.a: a name that is gone",
        "torch._nope: a name that is gone",
        "torch._C._nope: a name that is gone",
    ]
    assert find("torch._broken") is broken


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises is in the line."""
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    for name, text in {
        "_raising": "raise RuntimeError('no')",
        "_needy": "import nobody_has_this",
        "_partial": "from torch import nobody_has_this",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = gone_names(["torch._raising.a", "torch._needy", "torch._partial"])
    assert found[:2] == [
        "torch._raising: cannot be imported, RuntimeError: no",
        "torch._needy: cannot be imported, No module named 'nobody_has_this'",
    ]
    assert found[2].startswith(
        "torch._partial: cannot be imported, ImportError: cannot import name"
    )
    with pytest.raises(GoneError):
        find("torch._raising")


def test_what_belongs_to_torch_distributed_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is built without it, that is no finding."""
    names = ["torch.distributed.nope", "torch._C._distributed_c10d.nope"]
    assert len(gone_names(names)) == len(names)
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    assert gone_names(names) == []
