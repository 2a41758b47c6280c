"""The allow-lists of functions and operators reach no files, processes or code."""

from __future__ import annotations

import functools
import inspect
import json
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import fresh

import torch_fakeify as tfk
from torch_fakeify.compat.torch_graphs import function_modules, late_function_modules
from torch_fakeify.encoding import allowlist, names
from torch_fakeify.errors import FormatError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import (
    FunctionValue,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- what the lists reach -------------------------------------------------------------------------


def reachable() -> Iterator[tuple[str, Any]]:
    """Every function that a graph may name, with its name."""
    modules = {**function_modules(), **late_function_modules(dtensor=True)}
    for module in ("torch", *allowlist.WHOLE, *allowlist.LISTED):
        if module not in modules:
            assert module == "torch.foreach", "a listed module that this torch lacks"  # of 2.15
            continue
        for name, fn in names._listed(module, modules[module]):
            yield f"{module}.{name}", fn
    for name in dir(torch.Tensor):
        fn = getattr(torch.Tensor, name)
        if names._is_tensor_method(name) and isinstance(fn, names._METHOD_TYPES):
            yield f"torch.Tensor.{name}", fn


DANGEROUS = frozenset({
    "open", "exec", "eval", "compile", "__import__", "system", "popen", "Popen", "load_library",
    "save", "load", "loads", "dump", "dumps", "import_module", "urlopen", "connect", "socket",
    "environ", "getenv", "putenv", "unlink", "mkdir", "makedirs", "write", "define", "impl",
    "print", "attrgetter", "methodcaller", "globals", "locals", "check_call", "check_output",
    "download_url_to_file", "NamedTemporaryFile", "mkdtemp", "set_default_dtype", "register",
})  # fmt: skip

HARMLESS = {
    "torch.nn.functional.interpolate": "imports a module of torch, by a name in its own code",
    "torch.nn.functional.pad": "imports a module of torch, by a name in its own code",
    "torch.nn.functional.max_pool3d_with_indices": "imports a module of torch, by such a name",
    "torch._functorch.predispatch.lazy_load_decompositions": "registers torch's own, by env",
    "torch._functorch.vmap.lazy_load_decompositions": "registers torch's own, by env",
    "torch.autograd.forward_ad._maybe_load_decompositions": "registers torch's own, by env",
    "torch._numpy.issubdtype": "looks a dtype up among the names of its module",
}


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def test_no_listed_function_mentions_files_processes_or_code() -> None:
    """The Python code of every function that a graph may name, read for what it uses."""
    found: dict[str, set[str]] = {}
    count = 0
    for name, fn in reachable():
        count += 1
        plain = inspect.unwrap(fn)
        if isinstance(plain, types.FunctionType):
            used = set(_names_in(plain.__code__)) & DANGEROUS
            if used and name not in HARMLESS:
                found[name] = used
    assert found == {}
    assert count > 4000


def test_every_listed_function_is_torchs_or_pythons() -> None:
    """None has come into a listed module from elsewhere."""
    homes = {
        (getattr(fn, "__module__", None) or "torch").partition(".")[0] for _, fn in reachable()
    }
    assert homes <= {"torch", "math", "builtins", "_operator", "operator", "torchgen"}


SCHEMAS = """
import json, torch
from torch_fakeify.compat.torch_graphs import function_modules, late_function_modules

function_modules(), late_function_modules(dtensor=True)
print(json.dumps([[s.name, *(str(a.type) for a in s.arguments)]
                  for s in torch._C._jit_get_all_schemas()]))
"""
"""Prints the operators that torch registers, in a process where no test has registered others."""


def _text_operators() -> set[str]:
    found: set[str] = set()
    for name, *types_of in json.loads(fresh("-c", SCHEMAS).stdout):
        namespace, _, op = name.partition("::")
        if {"str", "Optional[str]", "List[str]"}.intersection(types_of):
            found.add(f"{namespace}.{op}")
    return found


@functools.cache
def _allowed_operators() -> frozenset[str]:
    allowed: set[str] = set()
    for name in _text_operators():
        try:
            names.decode_function(FunctionValue(kind="packet", name=name))
        except (UnknownNameError, FormatError):
            continue
        allowed.add(name)
    return frozenset(allowed)


def test_operators_that_take_text_take_no_file_names() -> None:
    """Of all operators that torch registers, those that take a text are of these kinds."""
    others = {
        name
        for name in _allowed_operators()
        if name.partition(".")[0] not in TEXT_NAMESPACES and name.partition(".")[0] != "aten"
    }
    assert others == set()
    of_aten = {name.removeprefix("aten.") for name in _allowed_operators() if name[:5] == "aten."}
    suspicious = {
        name
        for name in of_aten
        if any(word in name for word in ("file", "path", "save", "load", "open", "write"))
    }
    assert suspicious == set()


TEXT_NAMESPACES = {
    "_c10d_functional": "names of process groups that the process has made, and reductions",
    "_c10d_functional_autograd": "the same",
    "c10d_functional": "the same",
    "c10d": "the same",
    "symm_mem": "the same",
    "_dtensor": "the same",
    "cplib": "the same",
    "onnx": "modes of attention",
    "torchao": "kinds of rounding and mapping, where another test has imported it",
    "onnx_symbolic": "names of operators, which are not run",
    "mkldnn": "names of activation functions",
    "mkldnn_prepacked": "the same",
    "onednn": "the same",
    "quantized": "the same",
    "debug_mode_ops": "notes",
    "profiler": "names of ranges",
    "prims": "reductions",
    "export": "the attribute of a wrapper, which must be a tensor",
    "sparse": "activation functions",
    "streams": "names of streams",
    "static_runtime": "activation functions",
    "fsdp": "notes",
}


def test_the_encoder_refuses_what_the_decoder_refuses() -> None:
    """A frame that no reader would take is refused when it is recorded."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(getattr, (x, "grad_fn")))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(UnsupportedValueError, match="'grad_fn' may not be read"):
        tfk.capture(gm, [torch.ones(3)])
