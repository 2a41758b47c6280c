"""Stubs for the operators of a frame that are not registered in this process.

A stub has the recorded schema, and fake results by the recorded calls: enough to trace and compile.
It has no code; running it is refused.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from torch_fakeify.compat import torch_library
from torch_fakeify.compat.torch_graphs import TORCHS_NAMESPACES
from torch_fakeify.encoding.allowlist import DENIED_NAMESPACES
from torch_fakeify.encoding.operators import decode_schema
from torch_fakeify.errors import FakeKernelError, FormatError, StubError
from torch_fakeify.fake_kernels.kernels import fake_results
from torch_fakeify.records.tensor import FunctionValue

from .operator_calls import calls_of, fake_result

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch_fakeify.records.fake_kernel import FakeKernelDesc
    from torch_fakeify.records.frame import CaptureDesc, OperatorDesc
    from torch_fakeify.records.graph import GraphModuleDesc


@contextmanager
def operator_stubs(desc: CaptureDesc) -> Generator[tuple[OperatorDesc, ...], None, None]:
    """Register stubs of the operators that the graph names and this process lacks, for the block.

    Yields:
        The operators with a stub.

    Raises:
        FormatError: a schema cannot be parsed, or is of a namespace of torch.
        StubError: an operator cannot have a stub.
    """
    library = torch_library.StubLibrary(_refuse)
    try:
        yield tuple(_register(desc, library))
    finally:
        library.close()


def _register(desc: CaptureDesc, library: torch_library.StubLibrary) -> Iterator[OperatorDesc]:
    named = _named(desc.graph)
    missing: dict[str, list[tuple[OperatorDesc, str]]] = {}
    for at, each in enumerate(desc.operators):
        name = each.operator
        if name in named and not torch_library.registered_schemas(*name.split(".", 1)):
            missing.setdefault(name, []).append((each, f"capture.json $.operators[{at}]"))
    for name, overloads in sorted(missing.items()):
        namespace = name.partition(".")[0]
        if namespace in TORCHS_NAMESPACES or namespace in DENIED_NAMESPACES:
            raise FormatError(
                "an operator in a namespace of torch has no stub",
                where=overloads[0][1],
                expected="an operator of another library",
                found=name,
            )
        calls = calls_of(desc.graph, name)
        refusals: list[StubError] = []
        made: set[str] = set()
        for each, where in overloads:
            try:
                schema = decode_schema(each, where)
            except StubError as error:
                refusals.append(error)
                continue
            if schema.overload_name in made:
                raise FormatError("two schemas of one operator", where=where, found=each.schema)
            made.add(schema.overload_name)
            fake = functools.partial(_fake, schema, desc, calls, each.fake)
            library.define(schema, each.tags, fake, each.autograd)
            yield each
        needed = {"" if text == "default" else text for text in named[name] - {None}}
        if refusals and (not made or not needed <= made):
            raise refusals[0]


def _fake(
    schema: Any,
    desc: CaptureDesc,
    calls: Any,
    kernel: FakeKernelDesc | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the fake result of a call: by the recorded kernel, or by the recorded calls."""
    if kernel is not None:
        with suppress(FakeKernelError):  # the kernel has no formula for such a call
            return fake_results(kernel, schema, args, kwargs)
    return fake_result(schema, desc, calls, args, kwargs)


def _named(graph: GraphModuleDesc) -> dict[str, set[str | None]]:
    """Return the operators that a graph and its bodies name, with the overloads; ``None`` for any of them."""
    found: dict[str, set[str | None]] = {}
    for fx_node in (fx_node for each in graph.graphs() for fx_node in each.nodes):
        for value in (fx_node.target, *fx_node.args):
            if isinstance(value, FunctionValue) and value.kind == "op":
                name, _, overload = value.name.rpartition(".")
                found.setdefault(name, set()).add(overload)
            elif isinstance(value, FunctionValue) and value.kind == "packet":
                found.setdefault(value.name, set()).add(None)
    return found


def _refuse(name: str) -> NoReturn:
    raise StubError(
        f"torch.ops.{name} is a stub here: it has a schema and fake results, but no code",
        fix="Import the module that registers it (--import MODULE)",
    )


def stub_refusal(error: BaseException) -> StubError | None:
    """Return the error of a stub that an error of a compiler was raised from, if any."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, StubError):
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None
