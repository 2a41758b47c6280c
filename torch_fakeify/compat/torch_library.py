"""Torch's private registry of operators: schemas as text, autograd of operators, stubs of operators."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for

import torch._dynamo.config
from torch._library import autograd as _autograd
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.fake_impl import FakeImplCtx, set_ctx_getter
from torch._library.utils import has_fake_kernel, is_builtin

from torch_fakeify.errors import UnknownNameError

from .torch_configs import OwnSetting
from .torch_graphs import (
    TORCHS_NAMESPACES,
    OpOverload,
    OpOverloadPacket,
    find_operator,
    operators_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable


_MEMORY_FORMATS = (
    torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d,
)  # fmt: skip
"""By their numbers in ``c10/core/MemoryFormat.h``."""
_LAYOUTS = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch._mkldnn,  # pyright: ignore[reportAttributeAccessIssue]
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
    torch.jagged,
)
"""By their numbers in ``c10/core/Layout.h``."""

Autograd: TypeAlias = Literal["formula", "refused", "composite"]
_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradPrivateUse1")


def own_overloads(gm: torch.fx.GraphModule) -> list[OpOverload[..., Any]]:
    """Return all overloads of the operators outside of torch that a graph and its bodies name, by name."""
    return [
        overload
        for name, packet in operators_of(gm)
        if name.partition(".")[0] not in TORCHS_NAMESPACES
        for overload in _overloads(packet)
    ]


def _overloads(packet: OpOverloadPacket[Any, Any]) -> list[OpOverload[..., Any]]:
    return [getattr(packet, name) for name in packet.overloads()]


def registered_schemas(namespace: str, op: str) -> dict[str, str]:
    """Return the schemas of a registered operator by overload, as text; empty for one that is not."""
    packet = find_operator(namespace, op)
    found = [] if packet is None else [overload._schema for overload in _overloads(packet)]
    return {schema.overload_name: str(schema) for schema in found}


def parse_schema(text: str) -> Any:
    """Return a ``torch.FunctionSchema``.

    Raises:
        ValueError: torch cannot parse the text; the message is torch's first line about it.
    """
    try:
        return torch._C.parse_schema(text)
    except (RuntimeError, ValueError, IndexError) as error:  # the latter two of its numbers
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ValueError(lines[0] if lines else "torch cannot parse it") from error


def autograd_of(op: OpOverload[..., Any]) -> Autograd | None:
    """Return how autograd treats an operator: ``None`` if it has no kernel of it.

    ``formula`` has a backward of its own; ``refused`` raises when a gradient is computed; ``composite``
    calls other operators, which have theirs.
    """
    name = op._schema.name
    made = OPDEFS.get(name)
    if made is not None:
        return "refused" if made._backward_fn is None else "formula"
    full = full_name(op._schema)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(full, "CompositeImplicitAutograd"):
        return "composite"
    return "formula" if any(has_kernel(full, key) for key in _AUTOGRAD_KEYS) else None


def full_name(schema: Any) -> str:
    """Return ``namespace::name``, with ``.overload`` if it is not the default one."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def default_of(argument: Any) -> Any:
    """Return the default of an argument of a schema: a dtype, layout or memory format instead of torch's number of it."""
    value = argument.default_value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    match str(argument.real_type).removeprefix("Optional[").removesuffix("]"):
        case "ScalarType":
            return torch.ops.aten.empty.memory_format([0], dtype=value).dtype
        case "Layout":
            return _LAYOUTS[value]
        case "MemoryFormat":
            return _MEMORY_FORMATS[value]
        case _:
            return value


def result_context() -> Any:
    """Return the context of the fake kernel that is running, which makes unbacked sizes."""
    return torch.library.get_ctx()


class StubLibrary:
    """Operators that are registered by schema, with fake results and without code.

    ``close`` removes them from the process.
    """

    def __init__(self, refuse: Callable[[str], Any]) -> None:
        self._refuse = refuse
        self._libraries: dict[str, torch.library.Library] = {}

    def define(
        self,
        schema: Any,
        tags: Iterable[str],
        fake: Callable[..., Any],
        autograd: Autograd | None,
    ) -> None:
        """Register an operator.

        Args:
            schema: of `parse_schema`.
            tags: names of ``torch.Tag``; those that this torch lacks are ignored.
            fake: returns fake results for fake arguments.
            autograd: as of `autograd_of`; with ``formula`` and ``composite`` its gradients are those of
                another stub.
        """
        namespace, _, name = schema.name.partition("::")
        library = self._library(namespace)
        members: Any = torch.Tag.__members__
        text = str(schema).partition("::")[2]
        library.define(text, tags=tuple(members[tag] for tag in tags if tag in members))
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        refuse = self._refuse

        def run(*_args: Any, **_kwargs: Any) -> Any:
            return refuse(f"{namespace}.{full}")

        library.impl(full, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{full}", fake, lib=library)
        if autograd == "refused":
            packet = find_operator(namespace, name)
            op: Any = getattr(packet, schema.overload_name or "default")
            kernel = _autograd.make_autograd_impl(op, _autograd.Info(None, None))
            library.impl(full, kernel, "Autograd", with_keyset=True)
        elif autograd is not None:
            self._differentiate(f"{namespace}::{full}", library)

    def _differentiate(self, name: str, library: torch.library.Library) -> None:
        """Give an operator a gradient: the result of one more stub, which has the sizes of the inputs."""
        gradients = self._gradients()

        def setup(ctx: Any, inputs: Any, **_others: Any) -> None:
            leaves, ctx.structure = tree_flatten(list(inputs))
            ctx.has_gradient = [_has_gradient(each) for each in leaves]
            ctx.save_for_backward(*filter(_has_gradient, leaves))

        def backward(ctx: Any, *grads: Any) -> Any:
            leaves = tree_leaves(grads)
            given = [each for each in leaves if each is None or isinstance(each, torch.Tensor)]
            found = iter(gradients(name, given, list(ctx.saved_tensors)))
            results = [next(found) if each else None for each in ctx.has_gradient]
            return tuple(tree_unflatten(results, ctx.structure))

        torch.library.register_autograd(name, backward, setup_context=setup, lib=library)

    def _gradients(self) -> Any:
        """Return the operator of gradients, registered at the first call."""
        namespace, name = "torch_fakeify", "stub_gradients"
        if find_operator(namespace, name) is None:
            library = self._library(namespace)
            library.define(f"{name}(str operator, Tensor?[] grads, Tensor[] inputs) -> Tensor[]")
            library.impl(name, lambda op, *_: self._refuse(op), "CompositeExplicitAutograd")

            def fake(_operator: str, _grads: Any, inputs: Any) -> list[torch.Tensor]:
                return [torch.empty_like(each) for each in inputs]

            torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        return getattr(find_operator(namespace, name), "default")  # noqa: B009

    def _library(self, namespace: str) -> torch.library.Library:
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        return self._libraries[namespace]

    def close(self) -> None:
        """Remove the operators."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()


def _has_gradient(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and (value.is_floating_point() or value.is_complex())


def overload_of(op: Any) -> OpOverload[..., Any]:
    """Return the overload of an operator.

    Args:
        op: an overload; an operator with one overload, or whose default one is meant; a custom operator;
            or ``"namespace::name"``, with ``.overload`` if it is not the default one.

    Raises:
        UnknownNameError: there is no such operator.
    """
    if isinstance(op, OpOverload):
        return op
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        namespace, _, rest = op.partition("::")
        name, _, overload = rest.partition(".")
        packet = find_operator(namespace, name) if namespace and name else None
        if packet is None or (overload or "default") not in packet.overloads():
            raise UnknownNameError(
                "there is no such operator", expected="namespace::name", found=op,
                fix="Import the module that registers it",
            )  # fmt: skip
        found: OpOverload[..., Any] = getattr(packet, overload or "default")
        return found
    overloads = op.overloads() if isinstance(op, OpOverloadPacket) else []
    if "default" in overloads or len(overloads) == 1:
        return getattr(op, "default" if "default" in overloads else overloads[0])  # type: ignore[no-any-return]
    raise UnknownNameError(
        "not one operator",
        expected="torch.ops.namespace.name, a custom operator, or its name",
        found=f"{op!r:.80}" + (f" with the overloads {', '.join(overloads)}" if overloads else ""),
    )


class _Profiles(OwnSetting):
    """What torch asks for a fake result before it looks for a fake kernel: operator profiles."""

    def __init__(self, result: Callable[..., Any], others: Any) -> None:
        self._result = result
        self._others = others
        self.data = self

    def __contains__(self, op: object) -> bool:
        if self._others is not None and op in self._others.data:
            return True
        return isinstance(op, OpOverload) and not is_builtin(op) and not has_fake_kernel(op)

    def generic_fake_kernel(self, op: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if self._others is not None and op in self._others.data:
            return self._others.generic_fake_kernel(op, mode, *args, **kwargs)
        context = FakeImplCtx(mode, op)
        with set_ctx_getter(lambda: context), mode:
            return self._result(op, args, kwargs)


@contextmanager
def fake_results_by(result: Callable[..., Any]) -> Generator[None, None, None]:
    """Have a function make the fake results of operators that have no fake kernel, inside a block.

    Args:
        result: called with the operator, positional and keyword arguments.
    """
    others = torch._dynamo.config._custom_ops_profile
    with torch._dynamo.config.patch(_custom_ops_profile=_Profiles(result, others)):
        yield
