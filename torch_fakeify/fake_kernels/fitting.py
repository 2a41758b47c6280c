"""Fit the results of an operator: for sizes, strides, dtype and device of each the simplest formula.

Where one formula does not fit all rows, they are split by a feature of the arguments (a flag, the
number of dims, whether an argument is ``None``), and each part has a formula of its own.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.records import fake_kernel as fk

from .evaluating import Evaluation, NoValueError, is_same_strides
from .integers import cost_of
from .lists import Arguments, Formulas
from .observed import NamedValue, TensorFacts, is_integer, is_tensor_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_DEPTH = 3
"""Most features on the way to a formula."""
_FEWEST = 2
"""Fewest different rows that a case of its own needs."""
_MOST_CASES = 10
_MOST_ITEMS = 8
_MOST_FITS = 120
"""Most parts of the rows that are tried for one formula."""


class NoFitError(Exception):
    """No formula fits what was observed.

    Args:
        text: of which part of a result.
        kind: ``strides``, ``dtype``, or another part.
    """

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class _Group(Arguments):
    """Some calls; it finds formulas over their arguments."""

    def __init__(self, rows: Sequence[Evaluation]) -> None:
        super().__init__(rows)
        self._parts: dict[Any, list[tuple[Any, list[int], _Group]]] = {}

    @cached_property
    def formulas(self) -> Formulas:
        """The formulas over the arguments."""
        return Formulas(self)

    @cached_property
    def view_formulas(self) -> Formulas:
        """The same, with strides and offsets."""
        return Formulas(self, strides=True)

    def split(self, feature: Any) -> list[tuple[Any, list[int], _Group]]:
        """Return the groups of the rows for each value of a feature; none if it does not divide them."""
        if feature not in self._parts:
            self._parts[feature] = self._divided(feature)
        return self._parts[feature]

    def _divided(self, feature: Any) -> list[tuple[Any, list[int], _Group]]:
        found: dict[Any, list[int]] = defaultdict(list)
        try:
            for at, row in enumerate(self.rows):
                found[row.feature(feature)].append(at)
        except NoValueError:
            return []
        if not 1 < len(found) <= _MOST_CASES:
            return []
        if any(len(positions) < _FEWEST for positions in found.values()):
            return []
        order = sorted(found, key=lambda value: (str(type(value)), value))
        return [
            (value, found[value], _Group([self.rows[at] for at in found[value]])) for value in order
        ]

    def features(self, kinds: Iterable[str]) -> Iterator[Any]:
        """Yield the features that may divide the rows."""
        first = self.rows[0].args if self.rows else {}

        def values_of(name: str) -> list[Any]:
            return [row.args.get(name) for row in self.rows]

        for name in first:
            values = values_of(name)
            missing = sum(value is None for value in values)
            if 0 < missing < len(values):
                yield fk.IsNone(name)
            for kind, feature in ((bool, fk.Flag), (str, fk.Flag), (NamedValue, fk.Named)):
                if all(isinstance(value, kind) for value in values) and len(set(values)) > 1:
                    yield feature(name)
        for of in self.tensors:
            low, high = self.rank(of)
            if low != high:
                yield fk.Rank(of)
        for name in first:
            lists = [each for each in values_of(name) if isinstance(each, (list, tuple))]
            if len(lists) == len(self.rows) and len(set(map(len, lists))) > 1:
                yield fk.Length(name)
        if "dtype" in kinds:
            for of in self.tensors:
                yield fk.DtypeIs(of)
        if "size" in kinds:
            for of in self.numbers:
                for value in (0, 1, 2, -1):
                    yield fk.Compared("==", fk.Number(of), fk.Integer(value))
                yield fk.Compared(">=", fk.Number(of), fk.Integer(0))
            for of in self.tensors[:3]:
                low, _ = self.rank(of)
                for dim in range(min(low, 4)):
                    yield fk.Compared("==", fk.Size(of, dim), fk.Integer(1))
                yield fk.Compared("==", fk.Product(fk.Shape(of)), fk.Integer(0))
                for number in self.plain_numbers:
                    yield fk.Compared("==", fk.SizeAt(of, fk.Number(number)), fk.Integer(1))
            for left, right in permutations(self.tensors[:2], 2):
                for dim in range(min(self.rank(left)[0], self.rank(right)[0], 3)):
                    yield fk.Compared("<=", fk.Size(left, dim), fk.Size(right, dim))
        if "layout" in kinds:
            for of in self.tensors:
                yield fk.IsContiguous(of)


def fit_results(
    calls: Sequence[dict[str, Any]], results: Sequence[Sequence[Any]]
) -> tuple[tuple[Any, ...], tuple[fk.MadeSize, ...]]:
    """Return formulas for the results of an operator, and the sizes that depend on data.

    Args:
        calls: observed arguments.
        results: what each call returned, one for each item of the schema's returns.

    Raises:
        NoFitError: no formula fits.
    """
    sizes, made = _data_sizes(calls, results)
    group = _Group([Evaluation(args, None, each) for args, each in zip(calls, sizes, strict=True)])
    count = len(results[0]) if results else 0
    found = tuple(
        _result(
            [each[at] for each in results], group, f"result {at}" if count > 1 else "the result"
        )
        for at in range(count)
    )
    return found, made


# --- sizes that depend on data -------------------------------------------------------------------------


def _data_sizes(
    calls: Sequence[dict[str, Any]], results: Sequence[Sequence[Any]]
) -> tuple[list[tuple[int, ...]], tuple[fk.MadeSize, ...]]:
    """Return the sizes of each row that differ between calls whose arguments have equal metadata."""
    equal: dict[bytes, list[int]] = defaultdict(list)
    for at, args in enumerate(calls):
        equal[msgspec.msgpack.encode(args)].append(at)
    leaves = [dict(_leaves(each)) for each in results]
    names = sorted({name for each in leaves for name in each})
    vectors: dict[tuple[int, ...], str] = {}
    for name in names:
        for positions in equal.values():
            seen = {leaves[at].get(name) for at in positions}
            if len(seen) > 1:
                break
        else:
            continue
        values = [each.get(name) for each in leaves]
        if not all(isinstance(each, int) and each >= 0 for each in values):
            raise NoFitError(
                f"{name} depends on data, and is not a size in every call"
                if None not in values
                else "the number of dims or of results depends on data"
            )
        vectors.setdefault(tuple(values), name)  # type: ignore[arg-type]
    sizes = [tuple(each) for each in zip(*vectors, strict=True)] if vectors else [()] * len(calls)
    group = _Group([Evaluation(args) for args in calls])
    return sizes, tuple(_made_size(values, group) for values in vectors)


def _made_size(values: tuple[int, ...], group: _Group) -> fk.MadeSize:
    """Return a size that depends on data, with the smallest bound that all rows respect and one reaches."""
    found: list[tuple[int, float, Any]] = []
    for of in group.tensors:
        for part in (
            *(fk.Size(of, dim) for dim in range(group.rank(of)[0])),
            fk.Product(fk.Shape(of)),
        ):
            bounds = group.values(part)
            if bounds is None or bool((bounds < values).any()):
                continue
            reached = int((bounds == values).sum())
            if reached >= max(3, len(values) // 50):
                found.append((int((bounds - values).sum()), cost_of(part), part))
    upper = min(found, key=lambda each: each[:2])[2] if found else None
    return fk.MadeSize(upper=upper)


def _leaves(results: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the integers of results that may depend on data, with names."""
    for at, value in enumerate(results):
        items = value if isinstance(value, (list, tuple)) else [value]
        for position, each in enumerate(items):
            where = f"result {at}" if items is not value else f"result {at}[{position}]"
            if isinstance(each, TensorFacts):
                for dim, size in enumerate(each.size):
                    yield f"{where}.shape[{dim}]", size
            elif is_integer(each):
                yield where, each


# --- results -------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    if isinstance(value, TensorFacts):
        if value.is_argument:
            return f"argument {value.shares}"
        return "tensor" if value.shares is None else f"view of {value.shares}"
    if isinstance(value, (list, tuple)):
        return "list"
    return "int" if is_integer(value) else "constant"


def _result(values: list[Any], group: _Group, where: str, depth: int = _DEPTH) -> Any:
    kinds = {_kind(value) for value in values}
    if len(kinds) == 1:
        return _of_kind(values, group, where)
    if depth:
        for feature in group.features(("size", "layout")):
            parts = group.split(feature)
            if not parts:
                continue
            mixed = [len({_kind(values[at]) for at in positions}) for _, positions, _ in parts]
            if max(mixed) == 1 or (depth > 1 and min(mixed) == 1):
                try:
                    cases = tuple(
                        (value, _result([values[at] for at in positions], part, where, depth - 1))
                        for value, positions, part in parts
                    )
                except NoFitError:
                    continue
                return fk.Case(feature, cases)
    raise NoFitError(f"{where} is sometimes {' and sometimes '.join(sorted(kinds))}")


def _of_kind(values: list[Any], group: _Group, where: str) -> Any:
    first = values[0]
    if isinstance(first, TensorFacts):
        if first.is_argument:
            assert first.shares is not None
            return fk.SameTensor(fk.Arg(*first.shares))
        if any(value.layout != "strided" for value in values):
            raise NoFitError(f"{where} is not strided")
        return _view(values, group, where) if first.shares else _new_tensor(values, group, where)
    if isinstance(first, (list, tuple)):
        return _list(values, group, where)
    if _kind(first) == "int":
        return fk.IntResult(_fitted(values, group, _fit_int, f"the value of {where}"))
    if any(type(value) is not type(first) or value != first for value in values):
        return _fitted(values, group, _fit_constant, f"the value of {where}")
    return fk.ConstantResult(first)


def _new_tensor(values: list[TensorFacts], group: _Group, where: str) -> fk.NewTensor:
    return fk.NewTensor(
        size=_fitted([v.size for v in values], group, _fit_ints, f"the shape of {where}"),
        layout=_fitted(values, group, _fit_layout, f"the strides of {where}", ("layout", "size")),
        dtype=_fitted([v.dtype for v in values], group, _fit_dtype, f"the dtype of {where}", ("dtype",)),
        device=_fitted([v.device for v in values], group, _fit_device, f"the device of {where}", ()),
    )  # fmt: skip


def _view(values: list[TensorFacts], group: _Group, where: str) -> fk.View:
    shares = values[0].shares
    assert shares is not None
    of = fk.Arg(*shares)
    dtypes = [each.dtype(fk.DtypeOf(of)) for each in group.rows]
    if any(value.dtype != dtype for value, dtype in zip(values, dtypes, strict=True)):
        raise NoFitError(f"{where} is a view of another dtype")
    return fk.View(
        of=of,
        size=_fitted([v.size for v in values], group, _fit_ints, f"the shape of {where}"),
        stride=_fitted([v.stride for v in values], group, _fit_view_strides, f"the strides of {where}"),
        offset=_fitted([v.offset for v in values], group, _fit_offset, f"the offset of {where}"),
    )  # fmt: skip


def _list(values: list[list[Any]], group: _Group, where: str) -> Any:
    lengths = [len(value) for value in values]
    rows = [row.at(at) for row, n in zip(group.rows, lengths, strict=True) for at in range(n)]
    items = [item for value in values for item in value]
    reason: NoFitError | None = None
    is_fixed = len(set(lengths)) == 1
    if rows and not (is_fixed and lengths[0] == 1):
        try:
            item = _result(items, _Group(rows), f"an item of {where}")
            count = _fitted(lengths, group, _fit_int, f"the length of {where}")
            return fk.ListResult(count, item)
        except NoFitError as error:
            reason = error
    if is_fixed and lengths[0] <= _MOST_ITEMS:
        return fk.TupleResult(
            tuple(
                _result([value[at] for value in values], group, f"{where}[{at}]")
                for at in range(lengths[0])
            )
        )
    raise reason or NoFitError(f"the length of {where} fits no formula")


# --- one formula, or one for each case ------------------------------------------------------------------


def _fitted(
    targets: list[Any],
    group: _Group,
    fit: Callable[[list[Any], _Group], Any],
    where: str,
    kinds: Sequence[str] = ("size",),
) -> Any:
    """Return a formula that has the targets as its values, with cases if it must."""
    fits_left = _MOST_FITS

    def cases(targets: list[Any], group: _Group, depth: int) -> Any:
        nonlocal fits_left
        fits_left -= 1
        whole = fit(targets, group) if fits_left >= 0 else None
        if whole is not None or depth == 0 or fits_left < 0:
            return whole
        best: Any = None
        for feature in group.features(kinds):
            found: list[tuple[Any, Any]] = []
            for value, positions, part in group.split(feature):
                each = cases([targets[at] for at in positions], part, depth - 1)
                if each is None:
                    break
                found.append((value, each))
            else:
                if found:
                    made = fk.Case(feature, tuple(found))
                    if best is None or cost_of(made) < cost_of(best):
                        best = made
        return best

    for depth in range(_DEPTH + 1):
        found = cases(targets, group, depth)
        if found is not None:
            return found
    raise NoFitError(f"no formula fits {where}", kinds[0] if kinds else "")


def _fit_int(targets: list[int], group: _Group) -> Any:
    return group.formulas.integer(targets)


def _fit_offset(targets: list[int], group: _Group) -> Any:
    return group.view_formulas.integer(targets)


def _fit_ints(targets: list[tuple[int, ...]], group: _Group) -> Any:
    return group.formulas.list_of(targets)


def _fit_view_strides(targets: list[tuple[int, ...]], group: _Group) -> Any:
    """Strides of dims of size 1 do not matter, but formulas are sought with those that torch gives."""
    return group.view_formulas.list_of(targets)


def _fit_constant(targets: list[Any], _group: _Group) -> Any:
    first = targets[0]
    is_one = all(type(each) is type(first) and each == first for each in targets)
    return fk.ConstantResult(first) if is_one else None


def _fit_layout(values: list[TensorFacts], group: _Group) -> Any:
    tensors = group.tensors
    candidates: list[Any] = [fk.Contiguous()]
    candidates += map(fk.LikeStrides, tensors)
    candidates += [fk.FormatOf((of,)) for of in tensors]
    if len(tensors) > 1:
        candidates.append(fk.FormatOf(tuple(tensors[:2])))
    candidates += map(fk.Elementwise, combinations(tensors[:4], 2))
    if len(tensors) > 2:
        candidates.append(fk.Elementwise(tuple(tensors[:4])))
    ranks = {len(value.size) for value in values}
    if len(ranks) == 1:
        order = _order(values)
        if order is not None:
            candidates.append(fk.Ordered(order))
    candidates += [fk.GivenStrides(fk.Numbers(name)) for name in group.lists]
    return _first(
        candidates,
        lambda part, row, value: is_same_strides(
            value.size, row.strides(part, value.size), value.stride
        ),
        values,
        group,
    )


def _order(values: list[TensorFacts]) -> tuple[int, ...] | None:
    """Return the order of dims in memory of the tensor with most dims larger than 1."""
    best = max(
        values, key=lambda value: sum(n > 1 for n in value.size) if 0 not in value.size else -1
    )
    if 0 in best.size:
        return None
    dims = range(len(best.size))
    return tuple(sorted(dims, key=lambda dim: (-best.stride[dim], dim)))


def _fit_dtype(targets: list[str], group: _Group) -> Any:
    tensors = group.tensors
    dtypes = group.names(lambda value: isinstance(value, NamedValue) and value.kind == "dtype")
    candidates: list[Any] = [fk.DtypeOf(of) for of in tensors]
    candidates += map(fk.DtypeArg, dtypes)
    if len(set(targets)) == 1:
        varied = any(len({row.tensor(of).dtype for row in group.rows}) > 1 for of in tensors)
        constant = fk.ConstantDtype(targets[0])
        candidates.insert(0 if varied or not tensors else len(candidates), constant)
    numbers = [
        fk.Arg(name)
        for name in group.names(lambda value: isinstance(value, (bool, int, float, complex)))
    ]
    operands = [*tensors[:4], *numbers[:3]]
    for at, left in enumerate(operands):
        candidates += [fk.Promoted(left, right) for right in operands[at + 1 :] if left in tensors]
    whole = [fk.Arg(name) for name in group.names(is_tensor_list)]
    candidates += [fk.PromotedTypes((each,)) for each in whole]
    if len(tensors) > 2:
        candidates += [fk.PromotedTypes(tuple(tensors[:3])), fk.PromotedTypes(tuple(tensors[:6]))]
    candidates += [
        fk.Floating(part) for part in candidates if not isinstance(part, fk.ConstantDtype)
    ]
    found = _first(candidates, lambda part, row, dtype: row.dtype(part) == dtype, targets, group)
    if found is not None:
        return found
    for of in tensors:
        table: dict[str, str] = {}
        for row, target in zip(group.rows, targets, strict=True):
            if table.setdefault(row.tensor(of).dtype, target) != target:
                break
        else:
            return fk.DtypeTable(of, tuple(sorted(table.items())))
    return None


def _fit_device(targets: list[str], group: _Group) -> Any:
    candidates = [*map(fk.DeviceOf, group.tensors), fk.ConstantDevice(targets[0])]
    return _first(candidates, lambda part, row, device: row.device(part) == device, targets, group)


def _first(
    candidates: Iterable[Any],
    is_right: Callable[[Any, Evaluation, Any], bool],
    targets: Sequence[Any],
    group: _Group,
) -> Any:
    """Return the first part that is right in all rows; ``None`` if none is."""
    for part in candidates:
        with suppress(NoValueError):
            if all(is_right(part, *each) for each in zip(group.rows, targets, strict=True)):
                return part
    return None
