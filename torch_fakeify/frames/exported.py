"""Programs of ``torch.export``: what they have beside their graph, as records and back."""

from __future__ import annotations

import itertools
import operator
import re
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import torch
from torch.export import ExportedProgram, graph_signature
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.fx.proxy import GraphAppendingTracer, TraceError

from torch_fakeify.compat import (
    torch_dynamo,
    torch_export,
    torch_fakes,
    torch_graphs,
    torch_symbols,
)
from torch_fakeify.encoding.exprs import decode_expr, encode_expr
from torch_fakeify.encoding.sources import encode_source
from torch_fakeify.errors import (
    CaptureError,
    FormatError,
    UnknownNameError,
    UnsupportedValueError,
    wrap_torch_errors,
)
from torch_fakeify.frames.graph.calling import decode_structure, encode_structure
from torch_fakeify.frames.graph.modules import fill, read_tensors, reserved
from torch_fakeify.guards.checks import storage_of
from torch_fakeify.guards.tensor_guards import has_plain_storage
from torch_fakeify.records.frame import (
    ExportArgumentDesc,
    ExportDesc,
    ExportInputDesc,
    ExportModuleDesc,
    ExportOutputDesc,
    ExportRangeDesc,
)
from torch_fakeify.serialization.limits import check_exponents

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch_fakeify.records.frame import InputDesc
    from torch_fakeify.records.graph import CallingDesc
    from torch_fakeify.records.tensor import ExprDesc, SourceDesc

_ARGUMENTS: dict[str, Any] = {
    "tensor": graph_signature.TensorArgument,
    "int": graph_signature.SymIntArgument,
    "float": graph_signature.SymFloatArgument,
    "bool": graph_signature.SymBoolArgument,
    "constant": graph_signature.ConstantArgument,
    "token": graph_signature.TokenArgument,
}
_NAME = re.compile(r"[\w\[\]'.(), :/-]*", re.ASCII)
"""Names of sources that may be in the code that torch makes of guards: without double quotes and backslashes."""


# --- write ----------------------------------------------------------------------------------------


def describe_export(program: ExportedProgram, *, data: bool) -> ExportDesc:
    """Return the record of what a program has beside its graph; ``data``: with that of small constants.

    Raises:
        UnsupportedValueError: an input or output is an object of a custom class.
    """
    signature = program.graph_signature
    targets = set(signature.inputs_to_lifted_tensor_constants.values())
    constants = {
        name: value
        for name, value in program.constants.items()
        if name in targets and isinstance(value, torch.Tensor)
    }
    return ExportDesc(
        inputs=tuple(
            ExportInputDesc(
                kind=_kind(spec, ExportInputDesc),
                argument=_argument_desc(spec.arg),
                target=spec.target,
                persistent=spec.persistent,
            )
            for spec in signature.input_specs
        ),
        outputs=tuple(
            ExportOutputDesc(
                kind=_kind(spec, ExportOutputDesc),
                argument=_argument_desc(spec.arg),
                target=spec.target,
            )
            for spec in signature.output_specs
        ),
        modules=tuple(map(_module_desc, program.module_call_graph)),
        ranges=tuple(
            ExportRangeDesc(
                expr=encode_expr(expr), lower=encode_expr(span.lower), upper=encode_expr(span.upper)
            )
            for expr, span in program.range_constraints.items()
        ),
        dialects=tuple(verifier.dialect for verifier in program.verifiers),
        constants=tuple(read_tensors(constants).items()) if data else (),
    )


def _kind(spec: Any, record: type[msgspec.Struct]) -> Any:
    (field,) = (f for f in msgspec.structs.fields(record) if f.name == "kind")
    if spec.kind.name not in get_args(field.type):
        raise UnsupportedValueError(
            "an exported program has an input or output without a record",
            where=spec.arg.name,
            expected=", ".join(get_args(field.type)),
            found=spec.kind.name,
        )
    return spec.kind.name


def _argument_desc(argument: Any) -> ExportArgumentDesc:
    for kind, cls in _ARGUMENTS.items():
        if type(argument) is cls:
            value = argument.value if kind == "constant" else None
            return ExportArgumentDesc(kind=kind, name=argument.name, value=value)  # type: ignore[arg-type]
    raise UnsupportedValueError(
        "an input or output of an exported program has no record",
        where=argument.name,
        expected=", ".join(_ARGUMENTS),
        found=getattr(argument, "class_fqn", type(argument).__name__),
    )


def _module_desc(entry: ModuleCallEntry) -> ExportModuleDesc:
    signature = entry.signature
    if signature is None:
        return ExportModuleDesc(name=entry.fqn)
    calling: CallingDesc | None = None
    try:
        names = signature.forward_arg_names or ()
        where = f"module {entry.fqn!r}"
        calling = encode_structure(names, signature.in_spec, signature.out_spec, where)
    except UnsupportedValueError:
        pass  # `exported_program` says so
    return ExportModuleDesc(
        name=entry.fqn,
        has_signature=True,
        inputs=tuple(map(_argument_desc, signature.inputs)),
        outputs=tuple(map(_argument_desc, signature.outputs)),
        calling=calling,
    )


def with_sources(program: ExportedProgram, inputs: Sequence[InputDesc]) -> tuple[InputDesc, ...]:
    """Return the inputs of a program's graph with their sources, and parameters as such.

    The sources of parameters, buffers and constants start at the module, which is ``self``. The fake
    tensors of parameters in a program are no ``torch.nn.Parameter``.
    """
    users = iter(list(_user_sources(program)))
    kinds = graph_signature.InputKind
    found: list[InputDesc] = []
    for spec, desc in zip(program.graph_signature.input_specs, inputs, strict=True):
        source = None
        if spec.kind is kinds.USER_INPUT:
            source = next(users, None)
        elif spec.target is not None and spec.kind is not kinds.TOKEN:
            source = _module_source(spec.kind, spec.target)
        tensor = desc.tensor
        if spec.kind is kinds.PARAMETER and tensor is not None:
            tensor = msgspec.structs.replace(tensor, is_parameter=True)
        source_desc = desc.source if source is None else encode_source(source)
        found.append(msgspec.structs.replace(desc, source=source_desc, tensor=tensor))
    return tuple(found)


def shared_weights(
    program: ExportedProgram, inputs: Sequence[InputDesc]
) -> tuple[tuple[SourceDesc, SourceDesc], ...]:
    """Return the pairs of sources of a parameter, buffer or constant that several modules share.

    The graph reads each under one of its names. A program that was loaded has tensors of one geometry
    on one storage instead of one tensor, and fake tensors that share nothing.
    """
    first: dict[Any, SourceDesc] = {}
    pairs: list[tuple[SourceDesc, SourceDesc]] = []
    values = {**program.constants, **program.state_dict}
    for spec, desc in zip(program.graph_signature.input_specs, inputs, strict=True):
        t = values.get(spec.target or "")
        if not isinstance(t, torch.Tensor) or desc.source is None or not has_plain_storage(t):
            continue
        geometry = tuple(t.size()), t.stride(), t.storage_offset(), t.dtype
        earlier = first.setdefault((storage_of(t), geometry), desc.source)
        if earlier is not desc.source:
            pairs.append((desc.source, earlier))
    return tuple(pairs)


def _user_sources(program: ExportedProgram) -> Iterator[Any]:
    """Yield the sources of the user's inputs; nothing if a container has no paths."""
    sources, pytree = torch_dynamo.dynamo_source(), torch_graphs.pytree
    spec, names = program.call_spec.in_spec, program.module_call_graph[0].signature
    names = () if names is None else names.forward_arg_names or ()
    if spec is None:
        return
    try:
        args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)
        scope = {**dict(zip(names, args, strict=False)), **kwargs}
        paths = [path for path, _ in pytree.tree_flatten_with_path(scope)[0]]
    except Exception:  # noqa: BLE001 a class that cannot hold numbers, or without paths
        return
    for first, *rest in paths:
        source = sources.LocalSource(first.key)
        for key in rest:
            if isinstance(key, pytree.MappingKey):
                source = sources.DictGetItemSource(source, key.key)
            elif isinstance(key, pytree.SequenceKey):
                source = sources.GetItemSource(source, key.idx)
            else:
                source = sources.AttrSource(source, key.name)
        yield source


def _module_source(kind: graph_signature.InputKind, target: str) -> Any:
    sources = torch_dynamo.dynamo_source()
    *modules, last = target.split(".")
    source: Any = sources.LocalSource("self")
    for name in modules:
        source = sources.DictGetItemSource(sources.AttrSource(source, "_modules"), name)
    if kind is graph_signature.InputKind.CONSTANT_TENSOR:
        return sources.AttrSource(source, last) if last.isidentifier() else None
    table = "_parameters" if kind is graph_signature.InputKind.PARAMETER else "_buffers"
    return sources.DictGetItemSource(sources.AttrSource(source, table), last)


def with_guard_nodes(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the graph of ``ExportedProgram.module()`` with its guards as nodes.

    There they are one call of a module of generated code. Any other graph is returned itself.

    Raises:
        UnsupportedValueError: a guard cannot be traced.
    """
    calls = torch_export.guard_calls(gm)
    if not calls:
        return gm
    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    graph.set_codegen(gm.graph._codegen)
    tracer = GraphAppendingTracer(graph)
    for call in calls:
        arguments = [torch.fx.Proxy(copies[node], tracer) for node in call.all_input_nodes]
        try:
            with graph.inserting_before(copies[call]):
                gm.get_submodule(call.target).forward(*arguments)
        except (TraceError, TypeError, ValueError) as error:
            raise UnsupportedValueError(
                "a guard of the exported program cannot be a node",
                where=call.name,
                found=str(error),
                fix="Capture the program itself, or program.module(check_guards=False)",
            ) from error
        graph.erase_node(copies[call])
    copied = torch.fx.GraphModule(gm, graph, type(gm).__name__)
    copied.meta = gm.meta
    return copied


# --- read -----------------------------------------------------------------------------------------


def exported_program(
    export: ExportDesc,
    gm: torch.fx.GraphModule,
    records: Sequence[InputDesc],
    inputs: Sequence[Any],
    shape_env: Any | None,
    *,
    state_dict: Mapping[str, Any] | None,
    constants: Mapping[str, Any] | None,
) -> ExportedProgram:
    """Return the program of a record; arguments and errors are those of `Instance.exported_program`."""
    if len(export.inputs) != len(inputs):
        raise FormatError(
            "the signature does not fit the graph",
            where="$.export.inputs",
            expected=f"{len(inputs)} inputs",
            found=str(len(export.inputs)),
        )
    _check_names(export, shape_env)
    api, argument = graph_signature, _argument
    signature = api.ExportGraphSignature(
        [
            api.InputSpec(api.InputKind[d.kind], argument(d.argument), d.target, d.persistent)
            for d in export.inputs
        ],
        [
            api.OutputSpec(api.OutputKind[d.kind], argument(d.argument), d.target)
            for d in export.outputs
        ],
    )
    modules = [_module_entry(entry, i) for i, entry in enumerate(export.modules)]
    span: Any = torch_symbols.ValueRanges
    ranges: dict[Any, Any] = {}
    for i, each in enumerate(export.ranges):
        where = f"$.export.ranges[{i}]"
        expr, lower, upper = (_expr(d, where) for d in (each.expr, each.lower, each.upper))
        ranges[expr] = span(lower, upper)
    rows = list(zip(export.inputs, records, inputs, strict=True))
    data = dict(export.constants)
    in_state = [
        d.kind == "PARAMETER" or (d.kind == "BUFFER" and d.persistent) for d in export.inputs
    ]
    state = _tensors(itertools.compress(rows, in_state), data, state_dict, "state_dict")
    in_others = map(operator.not_, in_state)
    others = _tensors(itertools.compress(rows, in_others), data, constants, "constants")
    verifiers: list[Any] = list(map(torch_export.verifier_of, export.dialects))
    if None in verifiers:
        raise UnknownNameError(
            "no imported library has a verifier of this dialect",
            where="$.export.dialects",
            found=repr(export.dialects[verifiers.index(None)]),
            fix="Import the library that made the program, such as executorch.exir",
        )
    try:
        entry = modules[0].signature if modules else None
        example: Any = None
        if entry is not None:  # without data; its structure names the guards of ``module()``
            leaves = [_without_data(v) for spec, _, v in rows if spec.kind == "USER_INPUT"]
            example = torch_graphs.pytree.tree_unflatten(leaves, entry.in_spec)
        return ExportedProgram(
            gm,
            gm.graph,
            signature,
            state,
            ranges,
            modules,
            example,
            others,
            verifiers=verifiers,
        )
    except Exception as error:
        given = state_dict is not None or constants is not None
        raise CaptureError(
            "torch refuses the exported program",
            found=f"{type(error).__name__}: {error}",
            fix="Pass the state_dict and the constants of the exported program"
            if given
            else "The file is damaged: capture the program again",
        ) from error


def _expr(d: ExprDesc, where: str) -> Any:
    check_exponents(d.nodes, (), where)
    with wrap_torch_errors(where):
        return decode_expr(d)


def _tensors(
    rows: Iterable[tuple[ExportInputDesc, InputDesc, Any]],
    data: Mapping[str, bytes],
    given: Mapping[str, Any] | None,
    name: str,
) -> dict[str, Any]:
    """Return tensors of a program by target: given ones, recorded data, or the fake inputs.

    Raises:
        CaptureError: tensors are given, and one is missing that has no recorded data.
    """
    found: dict[str, Any] = dict(given or {})
    for spec, record, fake in rows:
        target = spec.target
        if target is None or spec.kind == "TOKEN" or target in found:
            continue
        if target in data and record.tensor is not None:
            where = f"$.export.constants[{target!r}]"
            found[target] = fill(fake, record.tensor, data[target], where)
        elif given is None:
            found[target] = fake
        else:
            raise CaptureError(
                f"a tensor of the program is not in {name}",
                expected=target,
                found=", ".join(given) or "nothing",
                fix="Pass the state_dict and the constants of the exported program, or none",
            )
    return found


def _without_data(value: Any) -> Any:
    """Return an input on the meta device with the recorded sizes, which can be copied and saved."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if not isinstance(value, torch.Tensor) or torch_fakes.is_traceable_wrapper_subclass(value):
        return value
    size: list[Any] = [n if isinstance(n, int) else n.node.hint for n in value.shape]
    if None in size:
        return value
    with torch_fakes.no_fake_mode():
        return torch.empty(size, dtype=value.dtype, device="meta")


def _check_names(export: ExportDesc, shape_env: Any | None) -> None:
    """Check what would end in code that torch generates.

    Raises:
        FormatError: a name is none of an attribute, or a source cannot be in code.
    """
    for i, spec in enumerate(export.inputs):
        for part in () if spec.target is None else spec.target.split("."):
            if not re.fullmatch(r"\w+", part, re.ASCII) or part in reserved():
                raise FormatError(
                    "a target is no name of an attribute",
                    where=f"$.export.inputs[{i}].target",
                    found=repr(spec.target),
                )
    for sources in () if shape_env is None else shape_env.var_to_sources.values():
        for source in sources:
            if not _NAME.fullmatch(source.name):
                raise FormatError(
                    "a source has a name that cannot be in code",
                    where="$.shape_env",
                    expected="keys without quotes and backslashes",
                    found=repr(source.name),
                )


def _argument(d: ExportArgumentDesc) -> Any:
    values = (d.value,) if d.kind == "constant" else ()
    return _ARGUMENTS[d.kind](d.name, *values)


def _module_entry(d: ExportModuleDesc, index: int) -> ModuleCallEntry:
    if not d.has_signature:
        return ModuleCallEntry(d.name)
    if d.calling is None:
        raise CaptureError(
            "the arguments or the result of the program have a structure without a record",
            where=f"module {d.name!r}" if d.name else None,
            expected="nested tuples, lists, named tuples, dicts with names as keys",
            fix="Use the graph: capture.compile() and capture.instantiate() need no structure",
        )
    names, in_spec, out_spec = decode_structure(d.calling, f"$.export.modules[{index}].calling")
    inputs, outputs = list(map(_argument, d.inputs)), list(map(_argument, d.outputs))
    signature = ModuleCallSignature(inputs, outputs, in_spec, out_spec, names or None)  # type: ignore[arg-type]
    return ModuleCallEntry(d.name, signature)
