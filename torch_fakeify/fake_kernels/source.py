"""Print a fake kernel as a function in plain torch, as a person would write it."""

from __future__ import annotations

import itertools
import keyword
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat.torch_library import default_of
from torch_fakeify.records import fake_kernel as fk

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_INDENT = "    "
_WIDTH = 88

_TEXTS: dict[type, str] = {
    fk.Integer: "{value}",
    fk.Size: "{of}.shape[{dim}]",
    fk.SizeAt: "{of}.shape[{dim}]",
    fk.Stride: "{of}.stride({dim})",
    fk.Offset: "{of}.storage_offset()",
    fk.Ndim: "{of}.ndim",
    fk.Number: "{of}",
    fk.ItemAt: "{name}[{at}]",
    fk.Length: "len({name})",
    fk.Total: "sum({of})",
    fk.SizesTotal: "sum(each.shape[{dim}] for each in {name})",
    fk.Index: "i",
    fk.Items: "[{items}]",
    fk.Shape: "{of}.shape",
    fk.Strides: "{of}.stride()",
    fk.Numbers: "{name}",
    fk.Broadcast: "torch.broadcast_shapes({of})",
    fk.Picked: "[{of}[dim] for dim in {at}]",
    fk.Compared: "{left} {op} {right}",
    fk.SameDtype: "{left}.dtype == {right}.dtype",
    fk.ConstantDtype: "torch.{name}",
    fk.DtypeOf: "{of}.dtype",
    fk.DtypeArg: "{name}",
    fk.Promoted: "torch.result_type({left}, {right})",
    fk.DeviceOf: "{of}.device",
    fk.View: "{of}.as_strided({size}, {stride}, {offset})",
    fk.SameTensor: "{of}",
    fk.IntResult: "{value}",
    fk.TupleResult: "[{items}]",
}
"""Formulas that are one expression of their fields."""

_FEATURES: dict[type, str] = {
    fk.Named: "{name} == torch.{value}",
    fk.Rank: "{of}.ndim == {value}",
    fk.DtypeIs: "{of}.dtype == torch.{value}",
    fk.Length: "len({name}) == {value}",
}
"""Features that have a value."""

_VARIABLES: tuple[tuple[Any, str], ...] = (
    (fk.Int, "n"),
    (fk.Ints, "size"),
    (fk.Dtype, "dtype"),
    (fk.Device, "device"),
)
"""Names of variables by the kind of formula; that of a result is ``result``."""


def kernel_source(kernel: fk.FakeKernelDesc, schema: Any) -> str:
    """Return the source of a fake kernel, which registers it."""
    given = schema.arguments
    defaults = {each.name: default_of(each) for each in given if each.has_default_value()}
    lists = {each.name for each in given if str(each.type).startswith("List[Tensor")}
    return _Writer(kernel, defaults, lists).text()


def formula_text(part: Any) -> str:
    """Return the condition of a check, or a size, as Python."""
    return _Writer(fk.FakeKernelDesc(operator="", arguments=()), {}, set())._feature(part, True)


class _Writer:
    """Prints formulas; what is no expression, such as cases, becomes statements before it."""

    def __init__(
        self, kernel: fk.FakeKernelDesc, defaults: Mapping[str, Any], lists: Collection[str]
    ) -> None:
        self._lists = lists
        self._kernel = kernel
        self._defaults = defaults
        self._lines: list[str] = []
        self._depth = 1
        self._names = set(map(_argument, kernel.arguments))
        self._made: dict[Any, str] = {}
        self._modules = {"torch"}
        self._sizes: list[str] = []

    def text(self) -> str:
        """Return the whole module."""
        for check in self._kernel.checks:
            self._write(f"# else {check.message or 'no formula was found'}")
            self._write(f"torch._check({self._feature(check.condition, True)})")
        if self._kernel.sizes:
            context = self._name("ctx")
            self._write(f"{context} = torch.library.get_ctx()")
            for each in self._kernel.sizes:
                name = self._name("count")
                self._sizes.append(name)
                lower = f"min={each.lower}" if each.lower else ""
                self._write(f"{name} = {context}.new_dynamic_size({lower})")
                if each.upper is not None:
                    self._write(f"torch._check({name} <= {self._expr(each.upper)})")
        results = [self._expr(part) for part in self._kernel.results]
        if not results:
            self._write("return None")
        else:
            self._write(f"return {', '.join(results)}")
        name = _argument(self._kernel.operator.partition("::")[2].replace(".", "_"))
        head = [f"import {module}" for module in sorted(self._modules)]
        body = [part for line in self._lines for part in _wrapped(line)]
        return "\n".join([
            *head, "", "", f'@torch.library.register_fake("{self._kernel.operator}")',
            *_wrapped(f"def {name}({self._parameters()}):"), *body, "",
        ])  # fmt: skip

    def _parameters(self) -> str:
        names = self._kernel.arguments
        first_keyword = len(names) - self._kernel.keywords
        parts: list[str] = []
        for at, name in enumerate(names):
            if at == first_keyword:
                parts.append("*")
            value = f"={_literal(self._defaults[name])}" if name in self._defaults else ""
            parts.append(f"{_argument(name)}{value}")
        return ", ".join(parts)

    def _write(self, line: str) -> None:
        self._lines.append(f"{_INDENT * self._depth}{line}")

    def _name(self, wanted: str) -> str:
        name, at = wanted, 2
        while name in self._names:
            name, at = f"{wanted}{at}", at + 1
        self._names.add(name)
        return name

    # --- cases ---

    def _cases(self, part: fk.Case) -> str:
        """Write the statements that give a variable the value of its case, and return its name."""
        if part not in self._made:
            first: Any = part
            while isinstance(first, fk.Case):
                first = first.cases[0][1]
            wanted = (name for kind, name in _VARIABLES if isinstance(first, kind))
            name = self._made[part] = self._name(next(wanted, "result"))
            self._assign(name, part)
        return self._made[part]

    def _assign(self, name: str, part: Any) -> None:
        if not isinstance(part, fk.Case):
            self._write(f"{name} = {self._expr(part)}")
            return
        values = [value for value, _ in part.cases]
        is_bool = set(values) == {True, False} and all(isinstance(each, bool) for each in values)
        ordered = sorted(part.cases, key=lambda each: not each[0]) if is_bool else part.cases
        for at, (value, found) in enumerate(ordered):
            made = dict(self._made)  # what a branch defines is not known after it
            if is_bool and at == 1:
                self._write("else:")
            else:
                test = self._feature(part.feature, value)
                self._write(f"{'elif' if at else 'if'} {test}:")
            self._depth += 1
            self._assign(name, found)
            self._depth -= 1
            self._made = made
        if not is_bool:
            self._write("else:")
            shown = ", ".join(map(str, values))
            self._write(f'{_INDENT}raise NotImplementedError("only seen with {shown}")')

    def _feature(self, part: Any, value: Any) -> str:
        match part:
            case fk.IsNone(name=name):
                return f"{_argument(name)} is {'' if value else 'not '}None"
            case fk.Flag(name=name) if isinstance(value, bool):
                return _argument(name) if value else f"not {_argument(name)}"
            case fk.Flag(name=name):
                return f"{_argument(name)} == {value!r}"
            case fk.Named() | fk.Rank() | fk.DtypeIs() | fk.Length():
                return _FEATURES[type(part)].format(value=value, **self._fields(part))
            case fk.IsContiguous(of=of):
                return f"{'' if value else 'not '}{_of(of)}.is_contiguous()"
            case _:
                text = self._expr(part)
                return text if value else f"not {text}"

    # --- expressions ---

    def _expr(self, part: Any, level: int = 0) -> str:
        """Print a formula; parentheses where its operator binds less than ``level``."""
        match part:
            case fk.Case():
                return self._cases(part)
            case fk.Binary():
                return self._binary(part, level)
            case fk.Seen(name=name, value=value):
                by = "is" if value in ("None", "True", "False") else "=="
                return f"{_argument(name)} {by} {value}"
            case fk.DtypeIn(of=of, names=names):
                if len(names) == 1:
                    return f"{_of(of)}.dtype == torch.{names[0]}"
                return f"{_of(of)}.dtype in ({', '.join(f'torch.{name}' for name in names)})"
            case fk.Product(of=fk.Shape(of=of)):
                return f"{_of(of)}.numel()"
            case fk.Product(of=of):
                self._modules.add("math")
                return f"math.prod({self._expr(of)})"
            case fk.DataSize(at=at):
                return self._sizes[at]
            case fk.Slice(of=of, start=start, stop=stop):
                low = "" if start is None else self._expr(start)
                high = "" if stop is None else self._expr(stop)
                return f"{self._expr(of)}[{low}:{high}]"
            case fk.Concat(parts=parts):
                inner = [
                    self._expr(each)[1:-1] if isinstance(each, fk.Items) else f"*{self._expr(each)}"
                    for each in parts
                ]
                return f"[{', '.join(filter(None, inner))}]"
            case fk.Swapped(of=of, first=first, second=second):
                name = self._name("swapped")
                a, b = self._expr(first), self._expr(second)
                self._write(f"{name} = list({self._expr(of)})")
                self._write(f"{name}[{a}], {name}[{b}] = {name}[{b}], {name}[{a}]")
                return name
            case fk.Reduced():
                return self._reduced(part)
            case fk.PromotedTypes(of=of):
                self._modules.add("functools")
                dtypes = [
                    f"*[each.dtype for each in {_of(each)}]"
                    if each.item is None and each.name in self._lists
                    else f"{_of(each)}.dtype"
                    for each in of
                ]
                return f"functools.reduce(torch.promote_types, [{', '.join(dtypes)}])"
            case fk.Floating(of=of):
                name = self._name("dtype")
                self._write(f"{name} = {self._expr(of)}")
                self._write(f"if not {name}.is_floating_point and not {name}.is_complex:")
                self._write(f"{_INDENT}{name} = torch.get_default_dtype()")
                return name
            case fk.DtypeTable(of=of, table=table):
                items = ", ".join(f"torch.{key}: torch.{value}" for key, value in table)
                return f"{{{items}}}[{_of(of)}.dtype]"
            case fk.ConstantDevice(name=name):
                return repr(name)
            case fk.NewTensor():
                return self._new(part)
            case fk.ConstantResult(value=value):
                return _literal(value)
            case fk.ListResult(count=count, item=item):
                name, number = self._name("results"), self._expr(count)
                self._write(f"{name} = []")
                self._write(f"for i in range({number}):")
                self._depth += 1
                made = dict(self._made)
                self._write(f"{name}.append({self._expr(item)})")
                self._made = made
                self._depth -= 1
                return name
            case _:
                return _TEXTS[type(part)].format(**self._fields(part))

    def _fields(self, part: Any) -> dict[str, str]:
        """Print the fields of a formula, by name."""
        return {name: self._field(getattr(part, name)) for name in part.__struct_fields__}

    def _field(self, value: Any) -> str:
        match value:
            case str():
                return _argument(value)
            case int():
                return str(value)
            case fk.Arg():
                return _of(value)
            case tuple():
                return ", ".join(map(self._expr, value))
            case _:
                return self._expr(value)

    def _binary(self, part: fk.Binary, level: int) -> str:
        if part.op in ("min", "max"):
            return f"torch.sym_{part.op}({self._expr(part.left)}, {self._expr(part.right)})"
        if part.op == "ceil":
            return f"-(-{self._expr(part.left, 3)} // {self._expr(part.right, 3)})"
        binding = 1 if part.op in "+-" else 2
        text = f"{self._expr(part.left, binding)} {part.op} {self._expr(part.right, binding + 1)}"
        return f"({text})" if binding < level else text

    def _reduced(self, part: fk.Reduced) -> str:
        sizes = self._expr(part.of)
        key = ("gone", part.of, part.dims)
        if key not in self._made:
            dims, gone = _argument(part.dims), self._name("gone")
            given = self._name("dims")
            self._write(f"{given} = [{dims}] if isinstance({dims}, int) else {dims}")
            self._write(
                f"{gone} = {{dim % max(len({sizes}), 1) for dim in {given}}} if {given} else set(range(len({sizes})))"
            )
            self._made[key] = gone
        gone = self._made[key]
        if part.keep:
            return f"[1 if dim in {gone} else n for dim, n in enumerate({sizes})]"
        return f"[n for dim, n in enumerate({sizes}) if dim not in {gone}]"

    def _new(self, part: fk.NewTensor) -> str:
        if isinstance(part.layout, fk.Case):
            # The strides alone differ: each case makes the whole tensor.
            cases = tuple(
                (value, fk.NewTensor(part.size, found, part.dtype, part.device))  # type: ignore[arg-type]
                for value, found in part.layout.cases
            )
            return self._cases(fk.Case(part.layout.feature, cases))
        size, dtype, device = map(self._expr, (part.size, part.dtype, part.device))
        base = part.device.of if isinstance(part.device, fk.DeviceOf) else None
        options = f"dtype={dtype}, device={device}"
        match part.layout:
            case fk.Contiguous() if base is not None:
                return f"{_of(base)}.new_empty({size}{self._other_dtype(base, part.dtype, dtype)})"
            case fk.Contiguous():
                return f"torch.empty({size}, {options})"
            case fk.LikeStrides(of=of) if part.size == fk.Shape(of) and base == of:
                return f"torch.empty_like({_of(of)}{self._other_dtype(of, part.dtype, dtype)})"
            case fk.GivenStrides(strides=given):
                strides = self._expr(given)
            case fk.LikeStrides(of=of):
                strides = f"torch.empty_like({_of(of)}).stride()"
            case fk.FormatOf(of=of):
                last = self._last(of)
                return f"torch.empty({size}, {options}, memory_format={last})"
            case fk.Elementwise(of=of):
                strides = f"({' + '.join(map(_of, of))}).stride()"
            case fk.Ordered(dims=dims):
                return f"torch.empty_permuted({size}, {dims}, {options})"
            case _:
                raise TypeError(type(part.layout).__name__)
        return f"torch.empty_strided({size}, {strides}, {options})"

    def _last(self, of: tuple[fk.Arg, ...]) -> str:
        """Write the statements that choose a memory format, and return the name of the variable."""
        key = ("format", of)
        if key not in self._made:
            name = self._made[key] = self._name("memory_format")
            self._write(f"{name} = torch.contiguous_format")
            self._write(
                "for rank, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):"
            )
            for each in of:
                text = _of(each)
                self._write(f"{_INDENT}if {text}.ndim != rank:")
                self._write(f"{_INDENT * 2}continue")
                self._write(
                    f"{_INDENT}if {text}.is_contiguous(memory_format=last) and {text}.stride(1) < {text}.stride(-1):"
                )
                self._write(f"{_INDENT * 2}{name} = last")
        return self._made[key]

    @staticmethod
    def _other_dtype(base: fk.Arg, part: Any, text: str) -> str:
        return "" if part == fk.DtypeOf(base) else f", dtype={text}"


def _wrapped(line: str) -> list[str]:
    """Return a line, or several with the parts of its outermost brackets if it is too long."""
    if len(line) <= _WIDTH or line.lstrip().startswith("#"):
        return [line[:_WIDTH]]
    groups: list[list[int]] = []
    depth = 0
    for at, letter in enumerate(line):
        if letter in "([{":
            if depth == 0:
                groups.append([at])
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                groups[-1].append(at)
        elif letter == "," and depth == 1:
            groups[-1].append(at)
    if not groups:
        return [line]
    edges = max(groups, key=lambda group: group[-1] - group[0])
    start, end = edges[0], edges[-1]
    if end <= start + 1:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + len(_INDENT))
    parts = [line[a + 1 : b].strip() for a, b in itertools.pairwise(edges)]
    is_one = len(parts) == 1
    inner = [f"{indent}{part}{'' if is_one else ','}" for part in parts if part]
    tail = line[end:]
    return [
        line[: start + 1],
        *(each for part in inner for each in _wrapped(part)),
        *_wrapped(f"{indent[: -len(_INDENT)]}{tail}"),
    ]


def _of(of: fk.Arg) -> str:
    name = _argument(of.name)
    return name if of.item is None else f"{name}[{of.item}]"


def _argument(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name == "torch" else name


def _literal(value: Any) -> str:
    text = repr(value)
    if isinstance(value, float) and text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    return text
