"""The call of one node as Python, with records of the tensors that it gets."""

from __future__ import annotations

import keyword
import re
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.encoding.names import encode_function
from torch_fakeify.errors import UnsupportedValueError

from .replies import OperatorCall, TensorArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["call_of"]

_MOST = 64
"""Largest number of whole numbers that are written out."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WORDS = (
    "torch",
    "call",
    "arguments",
    "facts",
    "inputs",
    "mode",
    "fakes",
    "sys",
    "operator",
    "math",
)


def call_of(fx_node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> OperatorCall:
    """Return the call of a node.

    Args:
        fx_node: a node that calls a function or a method.
        values: real values of its arguments.

    Raises:
        UnsupportedValueError: the function or an argument has no text.
    """
    texts = _Texts(fx_node.name, values)
    args = [texts.of(arg) for arg in fx_node.args]
    kwargs = [f"{name}={texts.of(arg)}" for name, arg in fx_node.kwargs.items()]
    if fx_node.op == "call_method":
        first, *rest = args
        text = f"{first}.{fx_node.target}({', '.join([*rest, *kwargs])})"
    elif fx_node.op == "call_function":
        text = f"{texts.function(fx_node.target)}({', '.join([*args, *kwargs])})"
    else:
        raise _unsupported(fx_node.name, fx_node.op)
    return OperatorCall(text, tuple(sorted(texts.imports)), tuple(texts.tensors))


class _Texts:
    def __init__(self, where: str, values: Mapping[torch.fx.Node, Any]) -> None:
        self._where = where
        self._values = values
        self._names: dict[int, str] = {}
        self._storages: dict[int, int] = {}
        self.tensors: list[TensorArgument] = []
        self.imports: set[str] = set()

    def of(self, arg: Any) -> str:
        """Write an argument."""
        return self._of(arg, "x")

    def _of(self, arg: Any, name: str) -> str:
        match arg:
            case torch.fx.Node():
                return self._of(self._values[arg], arg.name)
            case torch.Tensor():
                return self._tensor(arg, name)
            case None | bool() | int() | str() | complex() | range():
                return repr(arg)
            case float():
                return repr(arg) if arg == arg and abs(arg) != float("inf") else f'float("{arg}")'
            case EllipsisType():
                return "..."
            case slice():
                parts = (arg.start, arg.stop, arg.step)
                return f"slice({', '.join(self._of(each, name) for each in parts)})"
            case torch.Size() | tuple():
                items = [self._of(each, f"{name}_{i}") for i, each in enumerate(arg)]
                return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
            case list():
                items = [self._of(each, f"{name}_{i}") for i, each in enumerate(arg)]
                return f"[{', '.join(items)}]"
            case dict():
                pairs = (f"{self._of(k, name)}: {self._of(v, name)}" for k, v in arg.items())
                return "{" + ", ".join(pairs) + "}"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(arg)
            case torch.device():
                return f"torch.device({str(arg)!r})"
            case _:
                raise _unsupported(self._where, type(arg).__qualname__)

    def function(self, target: Any) -> str:
        """Write the name of a function, and import its module."""
        found = encode_function(target, where=self._where)
        if found.kind in ("op", "packet"):
            return f"torch.ops.{found.name}"
        if found.kind != "function":
            raise _unsupported(self._where, found.name)
        module, _, name = found.name.rpartition(".")
        if module == "builtins":
            return name
        if module.partition(".")[0] != "torch":
            self.imports.add(module)
        return found.name

    def _tensor(self, t: torch.Tensor, name: str) -> str:
        done = self._names.get(id(t))
        if done is not None:
            return done
        if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            raise _unsupported(self._where, f"{type(t).__qualname__} of {t.layout}")
        name = _identifier(name, self._names.values())
        self._names[id(t)] = name
        storage = t.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        numbers, low, high = _whole_numbers(t)
        self.tensors.append(
            TensorArgument(
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                tuple(t.stride()),
                int(t.storage_offset()),
                number,
                storage.nbytes() // t.element_size(),
                str(t.device),
                requires_grad=t.requires_grad,
                is_parameter=isinstance(t, torch.nn.Parameter),
                numbers=numbers,
                low=low,
                high=high,
            )
        )
        return name


def _whole_numbers(t: torch.Tensor) -> tuple[Any, int, int]:
    """Return the elements of a tensor of integers, if they are few, and the smallest and largest."""
    try:
        if t.dtype.is_floating_point or t.dtype.is_complex or not t.numel():
            return None, 0, 1
        whole = t.detach().to("cpu", torch.int64)
        low, high = int(whole.min()), int(whole.max())
    except (RuntimeError, NotImplementedError):  # a dtype of bits
        return None, 0, 1
    return (whole.tolist() if t.numel() <= _MOST else None), low, high


def _identifier(name: str, taken: Iterable[str]) -> str:
    name = re.sub(r"\W", "_", name)
    if not name.isidentifier() or keyword.iskeyword(name) or name in _WORDS:
        name = f"{name}_" if name.isidentifier() else f"x_{name}"
    while name in taken:
        name += "_"
    return name


def _unsupported(where: str, found: str) -> UnsupportedValueError:
    return UnsupportedValueError("a call that a script cannot write", where=where, found=found)
