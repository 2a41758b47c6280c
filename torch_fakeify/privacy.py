"""Every text in a capture that comes from the program that was recorded: ``show --privacy``.

Of numbers it has the elements of tensors that the file holds, and the hints that may be ones. A text is listed unless it stands where only words of torch's own stand, and is such a word. So
what this module does not know yet is listed, under ``other``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from .desc import EnumValue, FunctionValue, NamedTupleValue, OpaqueValue
from .desc_env import SymbolDesc
from .scalars import ITEM
from .text import escape, expr_text

if TYPE_CHECKING:
    from .desc_frame import CaptureDesc

_WORD = re.compile(r"[A-Za-z0-9_:.+-]*")
_SYMBOL = re.compile(r"(?:dim|z?[sufjz]+\d*|[a-z]+_?\d+)")
_OURS = re.compile(
    r"(?:aten|prims?|_?c10d_functional(?:_autograd)?|c10d|inductor(?:_prims)?|rngprims|mkldnn|mkl"
    r"|onednn|quantized(?:_decomposed)?|symm_mem|fsdp|streams|profiler|torch|operator|builtins|math"
    r"|numpy)\..*"
)
"""Operators, functions and classes of torch and Python."""

_VOCABULARY = frozenset({
    "ApplyNode.function", "AtomNode.name", "AutocastDesc.device_type", "AutocastDesc.dtype",
    "CaptureDesc.torch_version", "ConstraintDesc.kind", "ContextDesc.dynamic_sizes",
    "ContextDesc.dynamic_strides", "ContextDesc.kind", "FloatNode.value", "FloatValue.text",
    "FunctionValue.kind", "FunctorchDesc.kind", "InterpreterDesc.kind",
    "InterpreterDesc.randomness", "MarksDesc.static_input_type", "MetaTensorDesc.creation_meta",
    "MetaTensorDesc.device", "MetaTensorDesc.dtype", "MetaTensorDesc.grad_dtype",
    "MetaTensorDesc.layout", "ModesDesc.default_dtype", "ModesDesc.float32_matmul_precision",
    "NodeDesc.op", "OpaqueValue.kind", "SourceDesc.cls", "SparseDesc.index_dtype", "SymDesc.kind",
    "SymbolNode.assumptions", "SymbolDesc.assumptions", "TorchConstValue.kind",
    "TorchConstValue.name", "ViewCallDesc.op",
})  # fmt: skip
"""Fields that hold words of torch's."""

_SYMBOLS = frozenset({"SymbolNode.name", "SymbolDesc.name", "SymbolFactDesc.name"})

_HEADINGS = {
    "CallingDesc.arguments": "arguments",
    "CallingDesc.in_spec": "arguments",
    "CallingDesc.out_spec": "arguments",
    "CaptureDesc.backend": "backend",
    "CaptureDesc.frame": "functions",
    "CaptureDesc.parameter_sources": "attributes",
    "ContextDesc.shape_ids": "shape ids",
    "EnumValue.cls": "classes",
    "EnumValue.name": "classes",
    "FailureDesc.backend": "backend",
    "FailureDesc.message": "failure",
    "FailureDesc.type": "failure",
    "FrameDesc.code": "lines of code",
    "FrameDesc.file": "files",
    "FrameDesc.function": "functions",
    "FunctionValue.name": "operators and functions",
    "GraphModuleDesc.class_name": "graphs",
    "GraphModuleDesc.dropped_meta": "left out",
    "GraphModuleDesc.function_name": "functions",
    "GraphModuleDesc.modules": "attributes",
    "GraphModuleDesc.plain_tensors": "attributes",
    "GraphModuleDesc.shared": "notes",
    "GraphModuleDesc.submodule_aliases": "attributes",
    "GraphModuleDesc.submodules": "attributes",
    "GraphModuleDesc.tensor_data": "attributes",
    "GraphModuleDesc.tensors": "attributes",
    "GraphModuleDesc.transient_buffers": "attributes",
    "GraphModuleDesc.values": "attributes",
    "InputDesc.name": "node names",
    "InputDesc.value": "constants",
    "LocationDesc.framework_text": "lines of code",
    "LocationDesc.user_text": "lines of code",
    "MarksDesc.shape_ids": "shape ids",
    "NamedTupleValue.cls": "classes",
    "NodeDesc.args": "constants",
    "NodeDesc.dropped_meta": "left out",
    "NodeDesc.name": "node names",
    "NodeDesc.target": "targets",
    "RuntimeAssertDesc.msg": "messages",
    "ShapeEnvDesc.source_name_to_debug_name": "sources",
    "SourceDesc.name": "sources",
    "SubclassDesc.cls": "classes",
    "SubclassDesc.context": "constants",
    "SubclassDesc.opaques": "attributes",
    "SubclassDesc.tensors": "attributes",
    "TypeValue.name": "classes",
    "ViewCallDesc.args": "constants",
}
"""Where texts of a field are listed."""

_PAIRS = {
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
"""Fields of pairs: where the first are listed, and the others. ``words`` are torch's."""
_NAMED = {"FunctionValue.name", "TypeValue.name", "EnumValue.cls", "NamedTupleValue.cls",
          "SubclassDesc.cls"}  # fmt: skip
_ORDER = (
    "files", "functions", "lines of code", "sources", "node names", "targets", "attributes",
    "arguments", "constants", "keywords", "operators and functions", "classes", "notes", "messages",
    "shape ids", "graphs", "backend", "failure", "left out", "data", "other",
)  # fmt: skip


def privacy_lines(desc: CaptureDesc) -> list[str]:
    """The texts by what they are, each once, in the order of the file, safe to print."""
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
        """Note every text in a value; ``heading`` is where those belong that no field tells."""
        if isinstance(value, str):
            self._note(value, heading, field)
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
                    self._note(key, keys, field if keys != "words" else "meta")
                    self.visit(item, inside)
            else:
                self.visit(part, inside, field)

    def _note(self, text: str, heading: str, field: str) -> None:
        if not text:
            return
        is_word = field in _VOCABULARY or field == "meta"
        if is_word and _WORD.fullmatch(text):
            return
        heading = "other" if heading == "words" else heading
        if field in _SYMBOLS and _SYMBOL.fullmatch(text):
            return
        if field in _NAMED and _OURS.fullmatch(text):
            return
        self._put(heading, text)

    def _put(self, heading: str, text: str) -> None:
        self.texts.setdefault(heading, {})[text] = None
