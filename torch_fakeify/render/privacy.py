"""List every text of a capture that comes from the recorded program: ``show --privacy``.

Tensor elements, and hints that may be elements, are listed too. A text is omitted only if its field is
one for words of torch, and it is such a word. The texts of an unlisted field are under ``other``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.records.metadata_keys import CARRIED, MODULE_CARRIED, PLAIN
from torch_fakeify.records.redact_scalars import ITEM
from torch_fakeify.records.shape_env import SymbolDesc
from torch_fakeify.records.tensor import EnumValue, FunctionValue, NamedTupleValue, OpaqueValue

from .text import escape, expr_text

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

_WORD = re.compile(r"[A-Za-z0-9_:.+-]*")
_SYMBOL = re.compile(r"(?:dim|z?[sufjz]+\d*|[a-z]+_?\d+)")
_FRAMEWORK_NAMES = re.compile(
    r"(?:aten|prims?|_?c10d_functional(?:_autograd)?|c10d|inductor(?:_prims)?|rngprims|mkldnn|mkl"
    r"|onednn|quantized(?:_decomposed)?|symm_mem|fsdp|streams|profiler|torch|operator|builtins|math"
    r"|numpy)\..*"
)
"""Names of operators, functions and classes of torch and Python."""

_VOCABULARY = frozenset({
    "AotGraphDesc.kind", "ApplyNode.function", "AtomNode.name", "AutocastDesc.device_type", "AutocastDesc.dtype",
    "CaptureDesc.state", "CaptureDesc.torch_version", "ConstraintDesc.kind", "ContextDesc.dynamic_sizes",
    "ContextDesc.dynamic_strides", "ContextDesc.kind", "DeviceInfoDesc.capability",
    "DeviceInfoDesc.device", "ExportArgumentDesc.kind", "ExportDesc.dialects", "ExportInputDesc.kind", "ExportOutputDesc.kind",
    "FailureDesc.kind", "FloatNode.value", "FloatValue.text",
    "FunctionValue.kind", "FunctorchDesc.kind", "InterpreterDesc.kind",
    "InterpreterDesc.randomness", "MarksDesc.static_input_type", "MetaTensorDesc.creation_meta",
    "MetaTensorDesc.device", "MetaTensorDesc.dtype", "MetaTensorDesc.grad_dtype",
    "MetaTensorDesc.layout", "ModesDesc.default_dtype", "ModesDesc.float32_matmul_precision",
    "NodeDesc.op", "OpaqueValue.kind", "OperatorDesc.autograd", "OperatorDesc.tags", "SettingDesc.module", "SettingDesc.name", "SourceDesc.cls",
    "SparseDesc.index_dtype", "SurroundingsDesc.left_out", "SurroundingsDesc.machine",
    "SurroundingsDesc.python", "SurroundingsDesc.system", "SurroundingsDesc.versions", "SymDesc.kind",
    "SymbolNode.assumptions", "SymbolDesc.assumptions", "TorchConstValue.kind",
    "TorchConstValue.name", "ViewCallDesc.op",
})  # fmt: skip
"""Fields that contain words of torch or of this package."""

_SYMBOLS = frozenset({"SymbolNode.name", "SymbolDesc.name", "SymbolFactDesc.name"})

_HEADINGS = {field: heading for heading, fields in {
    "arguments": ("CallingDesc.arguments", "CallingDesc.in_spec", "CallingDesc.out_spec"),
    "backend": ("CaptureDesc.backend", "CaptureDesc.backend_place", "FailureDesc.backend"),
    "functions": ("CaptureDesc.frame", "FrameDesc.function", "GraphModuleDesc.function_name"),
    "attributes": (
        "CaptureDesc.parameter_sources", "ExportDesc.constants", "ExportInputDesc.target",
        "ExportModuleDesc.name", "ExportOutputDesc.target", "GraphModuleDesc.modules",
        "GraphModuleDesc.plain_tensors", "GraphModuleDesc.submodule_aliases",
        "GraphModuleDesc.submodules", "GraphModuleDesc.tensor_data", "GraphModuleDesc.tensors",
        "GraphModuleDesc.transient_buffers", "GraphModuleDesc.values", "SubclassDesc.opaques",
        "SubclassDesc.tensors",
    ),
    "shape ids": ("ContextDesc.shape_ids", "MarksDesc.shape_ids"),
    "devices": ("DeviceInfoDesc.name",),
    "classes": (
        "EnumValue.cls", "EnumValue.name", "NamedTupleValue.cls", "SubclassDesc.cls",
        "TypeValue.name",
    ),
    "node names": ("ExportArgumentDesc.name", "InputDesc.name", "NodeDesc.name"),
    "constants": (
        "ExportArgumentDesc.value", "InputDesc.value", "NodeDesc.args", "ProcessGroupDesc.name",
        "SubclassDesc.context", "ViewCallDesc.args",
    ),
    "failure": ("FailureDesc.message", "FailureDesc.type"),
    "lines of code": ("FrameDesc.code", "LocationDesc.framework_text", "LocationDesc.user_text"),
    "files": ("FrameDesc.file",),
    "operators and functions": ("FunctionValue.name", "OperatorDesc.schema"),
    "graphs": ("GraphModuleDesc.class_name",),
    "left out": ("GraphModuleDesc.dropped_meta", "NodeDesc.dropped_meta"),
    "notes": ("GraphModuleDesc.shared",),
    "targets": ("NodeDesc.target",),
    "messages": ("RuntimeAssertDesc.msg",),
    "sources": ("ShapeEnvDesc.source_name_to_debug_name", "SourceDesc.name"),
    "settings": ("SettingDesc.value", "SurroundingsDesc.mode", "SurroundingsDesc.options"),
    "environment": ("SurroundingsDesc.environment",),
    "packages": ("SurroundingsDesc.packages",),
}.items() for field in fields}  # fmt: skip
"""The heading under which texts of a field are listed."""

_PAIRS = {
    "CaptureDesc.operator_modules": ("operators and functions", "backend"),
    "GraphModuleDesc.meta": ("words", "notes"),
    "NodeDesc.kwargs": ("keywords", "constants"),
    "NodeDesc.meta": ("words", "notes"),
    "ShapeEnvDesc.co_fields": ("words", "files"),
    "ShapeEnvDesc.counter": ("words", "other"),
    "ShapeEnvDesc.shape_ids": ("shape ids", "other"),
    "ShapeEnvDesc.source_to_symbol": ("sources", "other"),
    "ShapeEnvDesc.source_to_var": ("sources", "other"),
    "SourceDesc.fields": ("words", "sources"),
    "ViewCallDesc.kwargs": ("keywords", "constants"),
}
"""The headings for the first and second items of a field of pairs; ``words`` are torch's."""
_NAMED = {"FunctionValue.name", "TypeValue.name", "EnumValue.cls", "NamedTupleValue.cls",
          "SubclassDesc.cls"}  # fmt: skip
_META_KEYS = CARRIED.keys() | MODULE_CARRIED.keys() | PLAIN.keys()
"""Metadata keys of torch; all others belong to the program."""
_ORDER = (
    "files", "functions", "lines of code", "sources", "node names", "targets", "attributes",
    "arguments", "constants", "keywords", "operators and functions", "classes", "notes", "messages",
    "shape ids", "graphs", "backend", "settings", "environment", "packages", "devices", "failure",
    "left out", "data", "other",
)  # fmt: skip


def privacy_lines(desc: CaptureDesc) -> list[str]:
    """Return the texts by heading, each once, in the order of the file, safe to print."""
    found = _Texts()
    found.visit(desc, "other")
    lines: list[str] = []
    for heading in _ORDER:
        texts = found.texts.get(heading)
        if not texts:
            continue
        lines.extend([*([""] if lines else []), f"{heading} ({len(texts)})"])
        lines.extend(f"  {text}" for text in texts)
    return [escape(line) for line in lines]


class _Texts:
    def __init__(self) -> None:
        self.texts: dict[str, dict[str, None]] = {}
        self._done: set[tuple[int, str]] = set()

    def visit(self, value: Any, heading: str, field: str = "") -> None:
        """Add every text in a value; ``heading`` is for fields without a heading."""
        if isinstance(value, str):
            self._add(value, heading, field)
        elif isinstance(value, bytes):
            self._put("data", f"{len(value)} bytes")
        elif isinstance(value, tuple):
            for item in value:  # pyright: ignore[reportUnknownVariableType]
                self.visit(item, heading, field)
        elif isinstance(value, msgspec.Struct) and (id(value), heading) not in self._done:
            self._done.add((id(value), heading))
            self._struct(value, heading)

    def _struct(self, value: msgspec.Struct, heading: str) -> None:
        kind = type(value).__name__
        if isinstance(value, SymbolDesc) and value.hint is not None:
            hint = expr_text(value.hint)
            for source in value.sources:
                if source.cls == ITEM:
                    self._put("data", f"{source.name} = {hint}")
        for name in value.__struct_fields__:
            field = f"{kind}.{name}"
            part = getattr(value, name)
            inside = _HEADINGS.get(field, heading)
            if isinstance(value, (EnumValue, FunctionValue, NamedTupleValue, OpaqueValue)) and (
                name in ("data", "items")
            ):
                inside = heading
            if field in _PAIRS:
                keys, inside = _PAIRS[field]
                for key, item in part:
                    is_word = keys == "words" and (inside != "notes" or key in _META_KEYS)
                    self._add(
                        key, "notes" if inside == "notes" else keys, "meta" if is_word else field
                    )
                    self.visit(item, inside)
            else:
                self.visit(part, inside, field)

    def _add(self, text: str, heading: str, field: str) -> None:
        if not text:
            return
        is_word = field in _VOCABULARY or field == "meta"
        if is_word and _WORD.fullmatch(text):
            return
        heading = "other" if heading == "words" else heading
        if field in _SYMBOLS and _SYMBOL.fullmatch(text):
            return
        if field in _NAMED and _FRAMEWORK_NAMES.fullmatch(text):
            return
        self._put(heading, text)

    def _put(self, heading: str, text: str) -> None:
        self.texts.setdefault(heading, {})[text] = None
