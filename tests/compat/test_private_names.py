"""The names of torch that ``compat`` needs, read from its source, and the missing ones."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

import pytest
import torch

from torch_fakeify.compat.private_names import (
    MissingNameError,
    find,
    missing_names,
    private_names,
    required_names,
)

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


def test_the_names_that_a_source_needs_are_found() -> None:
    """Imports and attributes count, at any level; names that are tested first and text do not."""
    assert sorted(required_names(SOURCE)) == sorted(NEEDED.split())


def test_the_names_that_compat_needs_exist() -> None:
    """Names of each kind of use, and of each module with private names, are found in its source."""
    names = set(private_names())
    assert {
        "torch._guards.SLoc",
        "torch.fx.graph._PyTreeInfo",
        "torch._C._functorch._add_batch_dim",
        "torch._dynamo.source",
        "torch._dynamo.exc.SkipFrame",
        "torch.nested._internal.nested_tensor._tensor_id_counter",
        "torch._export.verifier.load_verifier",
        "torch._library.fake_impl.FakeImplCtx",
        "torch._dynamo.backends.registry.lookup_backend",
    } <= names
    assert missing_names(names) == []


def test_each_missing_name_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be imported has one with its error; names inside a missing one have none."""
    broken = types.ModuleType("torch._broken")
    monkeypatch.setitem(sys.modules, "torch._halted", None)
    monkeypatch.setitem(sys.modules, "torch._broken", broken)
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    for name, text in {
        "_raising": "raise RuntimeError('no')",
        "_needy": "import nobody_has_this",
        "_partial": "from torch import nobody_has_this",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    names = """
        torch._halted.a torch._broken.a torch._nope.a torch._nope.b torch._C._nope.x torch.Tensor
        torch._raising.a torch._needy torch._partial
    """
    *found, partial = missing_names(names.split())
    assert found == [
        "torch._halted: a name that is missing",
        "torch._broken.a: a name that is missing",
        "torch._nope: a name that is missing",
        "torch._C._nope: a name that is missing",
        "torch._raising: cannot be imported, RuntimeError: no",
        "torch._needy: cannot be imported, No module named 'nobody_has_this'",
    ]
    assert partial.startswith("torch._partial: cannot be imported, ImportError: cannot import name")
    assert find("torch._broken") is broken
    with pytest.raises(MissingNameError):
        find("torch._raising")


def test_names_of_torch_distributed_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is built without it, that is no finding."""
    names = ["torch.distributed.nope", "torch._C._distributed_c10d.nope"]
    assert len(missing_names(names)) == len(names)
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    assert missing_names(names) == []
