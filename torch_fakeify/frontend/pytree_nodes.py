"""The parts of a value whose class is registered with ``torch.utils._pytree``, with their paths.

A path consists of attributes and items, so that it applies to other values too. The keys with which the
class is registered are used if they lead to the parts, else an attribute or item that is the part. If
the parts are computed, such as the keys and values of a ``DynamicCache``, the parts are instead all
tensors inside the value.
"""

from __future__ import annotations

import copy
import enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from torch_fakeify.compat import torch_graphs
from torch_fakeify.errors import UnsupportedValueError, class_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Access: TypeAlias = tuple[str, Any]
"""One access to a part of a value: ``("item", key)`` or ``("attr", name)``."""

_MAX_DEPTH = 8
"""The most accesses from a value to a tensor inside it."""
_MAX_OBJECTS = 100_000
"""The most objects that are searched for tensors."""
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Types of constants, which are guarded when they are attributes of a value."""
_CLOSED = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module, str, bytes,
)  # fmt: skip
"""Types of values that are not searched for tensors."""
_MISSING: Any = object()
_REGISTER = (
    "Register the class with torch.utils._pytree.register_pytree_node(..., flatten_with_keys_fn=...), "
    "with keys that lead to each part of it"
)


class Node(NamedTuple):
    """The parts of a value of a registered class."""

    value: Any
    spec: Any
    """Its ``TreeSpec``."""
    parts: list[tuple[tuple[Access, ...], Any]]
    is_whole: bool
    """Whether the parts are the children of its pytree node; else they are all tensors inside it."""

    @property
    def between(self) -> list[tuple[tuple[Access, ...], Any]]:
        """The objects on the paths to the parts, outer ones first."""
        found: dict[tuple[Access, ...], Any] = {}
        for path, _ in self.parts:
            for end in range(1, len(path)):
                found.setdefault(path[:end], part_at(self.value, path[:end]))
        return list(found.items())

    def remade(self, parts: Sequence[Any], where: str) -> Any:
        """A copy of the value with other parts.

        Raises:
            UnsupportedValueError: it cannot be copied.
        """
        made = self._copied(parts) if self.is_whole else self._deep_copied(parts, where)
        if made is None:
            made = torch_graphs.tree_unflatten(parts, self.spec)
            copy_constants(made, plain_attributes(self.value))
        for (path, _), part in zip(self.parts, parts, strict=True):
            if part_at(made, path) is not part:
                raise UnsupportedValueError(
                    "a copy of the value does not have the parts that were set",
                    where=f"{where}{access_text(path)}",
                    found=class_name(type(self.value)),
                    fix=_REGISTER,
                )
        return made

    def _copied(self, parts: Sequence[Any]) -> Any:
        """A shallow copy with other parts; ``None`` if its parts cannot be set."""
        try:
            made = copy.copy(self.value)
            for (path, _), part in zip(self.parts, parts, strict=True):
                set_part(made, path[-1], part)
        except (TypeError, AttributeError, LookupError, ValueError, NotImplementedError):
            return None
        return made if made is not self.value else None

    def _deep_copied(self, parts: Sequence[Any], where: str) -> Any:
        memo = {id(old): new for (_, old), new in zip(self.parts, parts, strict=True)}
        try:
            return copy.deepcopy(self.value, memo)
        except Exception as error:
            raise UnsupportedValueError(
                "a value cannot be copied",
                where=where,
                found=f"{class_name(type(self.value))}: {type(error).__name__}: {error}",
                fix=_REGISTER,
            ) from error


def node_of(value: Any, where: str) -> Node | None:
    """The parts of a value, or ``None`` if its class is not registered.

    Raises:
        UnsupportedValueError: no path leads to a tensor in it, or it cannot be flattened.
    """
    found = children_of(value, where)
    if found is None:
        return None
    children, spec = found
    accesses = _accesses_to(value, children, where)
    if accesses is not None:
        parts = [((access,), child) for access, child in zip(accesses, children, strict=True)]
        return Node(value, spec, parts, is_whole=True)
    inside = list(tensors_in(value))
    reached = {id(t) for _, t in inside}
    leaves, spec = flattened(value, where)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in reached:
            raise UnsupportedValueError(
                f"no attribute or item leads to leaf {i} of a value",
                where=where,
                found=class_name(type(value)),
                fix=_REGISTER,
            )
    return Node(value, spec, inside, is_whole=False)


def children_of(value: Any, where: str) -> tuple[list[Any], Any] | None:
    """The children of a value of a registered class, and its ``TreeSpec`` of depth one.

    Raises:
        UnsupportedValueError: its class cannot flatten it.
    """
    roots = [value]  # the first value that `is_leaf` gets

    def is_leaf(_: Any) -> bool:
        return not roots or roots.pop() is None

    children, spec = flattened(value, where, is_leaf)
    if spec.is_leaf():
        return None
    if any(child is value for child in children):
        raise UnsupportedValueError(
            "a value contains itself", where=where, found=type(value).__qualname__
        )
    return children, spec


def flattened(
    value: Any, where: str, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any]:
    """The leaves and the ``TreeSpec`` of a value.

    Raises:
        UnsupportedValueError: its class cannot flatten it.
    """
    try:
        return torch_graphs.tree_flatten(value, is_leaf=is_leaf)
    except Exception as error:
        raise UnsupportedValueError(
            "a value cannot be flattened",
            where=where,
            found=f"{class_name(type(value))}: {type(error).__name__}: {error}",
        ) from error


def _accesses_to(value: Any, children: Sequence[Any], where: str) -> list[Access] | None:
    """An access for each child; ``None`` if there is a child without one."""
    keys = _keys_of(value, len(children), where)
    found: list[Access] = []
    for i, child in enumerate(children):
        paths = [*keys[i : i + 1], *_named(value, child), ("item", i)]
        access = next((w for w in paths if w not in found and _get(value, w) is child), None)
        if access is None:
            return None
        found.append(access)
    return found


def _keys_of(value: Any, count: int, where: str) -> list[Access]:
    """The keys under which the class is registered for the children, or those of a dictionary."""
    pytree: Any = torch_graphs.pytree
    try:
        paths = pytree.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)[0]
    except ValueError:  # registered without keys
        if not isinstance(value, dict) or len(value) != count:
            return []
        return [_of_key(value, key) for key in value]
    except Exception as error:
        raise UnsupportedValueError(
            "a value cannot be flattened with keys",
            where=where,
            found=f"{class_name(type(value))}: {type(error).__name__}: {error}",
        ) from error
    accesses: list[Access] = []
    for key_path, _ in paths:
        match key_path[0] if len(key_path) == 1 else None:
            case pytree.GetAttrKey(name=name):
                accesses.append(("attr", name))
            case pytree.SequenceKey(idx=i):
                accesses.append(("item", i))
            case pytree.MappingKey(key=key):
                accesses.append(_of_key(value, key))
            case _:
                accesses.append(("item", _MISSING))
    return accesses


def _of_key(value: Any, key: Any) -> Access:
    """The access for a key of a mapping: the attribute if it is the same, as for ``ModelOutput``."""
    held = dict(attributes_of(value)).get(key, _MISSING)
    is_attribute = held is not _MISSING and held is _get(value, ("item", key))
    return ("attr" if is_attribute else "item", key)


def _named(value: Any, child: Any) -> Iterator[Access]:
    """The attributes that are a certain child; none for constants, which have no identity."""
    if not isinstance(child, PLAIN):
        yield from (("attr", name) for name, held in attributes_of(value) if held is child)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The instance attributes of an object, including those in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots: Any = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held = getattr(value, name, _MISSING)
            if held is not _MISSING and name not in {"__dict__", "__weakref__"}:
                yield name, held


def plain_attributes(value: Any) -> list[tuple[str, Any]]:
    """The constant attributes of an object."""
    return [(name, held) for name, held in attributes_of(value) if isinstance(held, PLAIN)]


def tensors_in(
    value: Any, path: tuple[Access, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[Access, ...], torch.Tensor]]:
    """Every tensor inside an object that is no module, with the first path to it."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in seen or isinstance(value, _CLOSED):
        return
    if len(path) > _MAX_DEPTH or len(seen) > _MAX_OBJECTS:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside: Iterable[tuple[Access, Any]] = (
            (("item", key), part) for key, part in value.items()
        )
    elif isinstance(value, (list, tuple)):
        inside = ((("item", i), part) for i, part in enumerate(value))
    else:
        inside = ((("attr", name), part) for name, part in attributes_of(value))
    for access, part in inside:
        yield from tensors_in(part, (*path, access), seen)


def _get(value: Any, access: Access) -> Any:
    kind, key = access
    try:
        if kind == "item" and isinstance(value, dict) and key not in value:
            return _MISSING  # does not add a default to a defaultdict
        return getattr(value, key) if kind == "attr" else value[key]
    except (AttributeError, LookupError, TypeError, ValueError, NotImplementedError):
        return _MISSING


def part_at(value: Any, path: Sequence[Access]) -> Any:
    """The part of a value at a path; a unique sentinel if there is none."""
    for access in path:
        value = _get(value, access)
    return value


def set_part(value: Any, access: Access, part: Any) -> None:
    """Set a part of a value, also of a frozen dataclass."""
    kind, key = access
    if kind == "item":
        value[key] = part
        return
    try:
        setattr(value, key, part)
    except AttributeError:  # frozen
        object.__setattr__(value, key, part)


def copy_constants(made: Any, constants: Iterable[tuple[str, Any]]) -> None:
    """Set the constants (`plain_attributes` of the original) that unflattening has not restored."""
    has = dict(plain_attributes(made))
    for name, held in constants:
        if name not in has or has[name] != held:
            set_part(made, ("attr", name), held)


def access_text(path: Sequence[Access]) -> str:
    """A path as Python source text."""
    return "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)
