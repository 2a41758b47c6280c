"""What an operator requires of its arguments, learnt from the calls that it refused."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from torch_fakeify.records import fake_kernel as fk

from .evaluating import Evaluation, NoValueError
from .integers import cost_of
from .lists import Arguments
from .observed import is_tensor_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    _Call = dict[str, Any]

_MOST = 12
_FEWEST_VALUES = 3
_FEWEST = 12
"""Fewest accepted calls from which requirements are learnt."""


def requirements(
    accepted: Sequence[_Call],
    refused: Sequence[_Call],
    errors: Sequence[str],
    samples: Sequence[_Call],
) -> tuple[fk.Check, ...]:
    """Return the simplest conditions that hold in all accepted calls, and that refused ones violate.

    Args:
        accepted: arguments that the operator accepted.
        refused: those that it refused.
        errors: what it raised in these.
        samples: the arguments that were given.
    """
    if len(accepted) < _FEWEST or not refused:
        return ()
    arguments = Arguments(list(map(Evaluation, accepted)))
    others = list(map(Evaluation, refused))
    found: list[tuple[Any, set[int]]] = []
    fixed = dict(_fixed_sizes(samples))
    if arguments.numbers:  # a multiple of one of them may be one of a constant by chance
        fixed.update(_multiples(arguments))
    for condition in (*_candidates(arguments), *fixed):
        try:
            holds = all(each.feature(condition) for each in arguments.rows)
        except NoValueError:
            continue
        if not holds or not _is_supported(condition, arguments.rows):
            continue
        violated = {at for at, each in enumerate(others) if not each.allows(condition)}
        if condition in fixed:
            named = sum(_names(errors[at], fixed[condition]) for at in violated)
            if 2 * named < len(violated):
                continue  # the number may follow from others, which are equal in all samples
        if violated:
            found.append((condition, violated))
    left = set(range(len(refused)))
    checks: list[fk.Check] = []
    while found and len(checks) < _MOST:
        best = max(found, key=lambda each: (len(each[1] & left), -cost_of(each[0])))
        gone = best[1] & left
        if not gone:
            break
        checks.append(fk.Check(condition=best[0], message=errors[min(gone)][:200]))
        left -= gone
        found.remove(best)
    return tuple(checks)


def _is_supported(condition: Any, accepted: Sequence[Evaluation]) -> bool:
    """Return whether accepted calls say more of a divisor than that one and the number itself are divisors."""
    match condition:
        case fk.Compared(left=fk.Binary(op="%", left=whole, right=divisor)):
            pairs = {(each.int(whole), each.int(divisor)) for each in accepted}
            return len({(a, b) for a, b in pairs if b > 1 and a > b}) >= _FEWEST_VALUES
        case _:
            return True


def _candidates(arguments: Arguments) -> Iterator[fk.Compared | fk.SameDtype | fk.DtypeIn]:
    tensors = arguments.tensors[:6]
    ranks = {of: arguments.rank(of) for of in tensors}
    for of, (low, high) in ranks.items():
        yield from rank_limits(of, low, high)
        dtypes = {each.tensor(of).dtype for each in arguments.rows}
        yield fk.DtypeIn(of, tuple(sorted(dtypes)))
    for left, right in combinations(tensors, 2):
        yield fk.Compared("==", fk.Ndim(left), fk.Ndim(right))
        yield fk.SameDtype(left, right)
        yield fk.Compared("==", fk.Product(fk.Shape(left)), fk.Product(fk.Shape(right)))
    for name in arguments.names(is_tensor_list):
        yield fk.Compared(">=", fk.Length(name), fk.Integer(1))
    numbers = [fk.Number(of) for of in arguments.numbers[:8]]
    for each in numbers:
        values = arguments.values(each)
        if values is not None and len(set(values.tolist())) == 1:
            yield fk.Compared("==", each, fk.Integer(int(values[0])))
    dims = _dims(arguments)
    numbers = [each for each in numbers if _is_varied(each, arguments)]
    for left, right in combinations(dims, 2):
        yield fk.Compared("==", left, right)
    for size in dims:
        plain = [each for each in numbers if each.of.item is None]
        for number in [*numbers, *dims]:
            if number != size:
                yield fk.Compared("==", fk.Binary("%", size, number), fk.Integer(0))
        for number in plain:
            yield fk.Compared(">=", size, number)
        for number in numbers:
            yield fk.Compared("==", size, number)
        for left, right in pairwise(plain):
            by = fk.Binary("*", left, right)
            yield fk.Compared("==", fk.Binary("%", size, by), fk.Integer(0))
    for each in numbers:
        for bound in (0, 1):
            yield fk.Compared(">=", each, fk.Integer(bound))
        for of in tensors:
            yield fk.Compared(">=", fk.Ndim(of), fk.Binary("+", each, fk.Integer(1)))
            yield fk.Compared(">=", fk.Binary("+", each, fk.Ndim(of)), fk.Integer(0))
    for each in dims:
        yield fk.Compared(">=", each, fk.Integer(1))
    if not arguments.numbers:
        yield from dict(_multiples(arguments))


def rank_limits(of: fk.Arg, low: int, high: int) -> list[fk.Compared]:
    """Return that the number of dims of a tensor is between two."""
    if low == high:
        return [fk.Compared("==", fk.Ndim(of), fk.Integer(low))]
    return [
        fk.Compared(">=", fk.Ndim(of), fk.Integer(low)),
        fk.Compared("<=", fk.Ndim(of), fk.Integer(high)),
    ]


def _dims(arguments: Arguments) -> list[fk.Size]:
    """Return the sizes that have several values in accepted calls."""
    found: list[fk.Size] = []
    for of in arguments.tensors[:6]:
        low, high = arguments.rank(of)
        found += [fk.Size(of, dim) for dim in range(min(low, 5))]
        if low != high:
            found += [fk.Size(of, -dim) for dim in range(1, min(low, 3) + 1)]
    return [each for each in found if _is_varied(each, arguments)]


def _multiples(arguments: Arguments) -> Iterator[tuple[fk.Compared, int]]:
    """Yield that a size is a multiple of a small number, and the number."""
    for size in _dims(arguments):
        for n in (2, 3, 4):
            yield fk.Compared("==", fk.Binary("%", size, fk.Integer(n)), fk.Integer(0)), n


def _fixed_sizes(samples: Sequence[_Call]) -> Iterator[tuple[fk.Compared, int]]:
    """Yield each size that is one number in all samples, and the number, of tensors whose other sizes differ."""
    if len(samples) < 2:  # all sizes of one sample are one number
        return
    given = Arguments(list(map(Evaluation, samples)))
    for of in given.tensors[:6]:
        low, high = given.rank(of)
        sizes = [each.tensor(of).size for each in given.rows]
        if low == high and len(set(sizes)) > 1:
            for dim, values in enumerate(zip(*sizes, strict=True)):
                if len(set(values)) == 1:
                    yield fk.Compared("==", fk.Size(of, dim), fk.Integer(values[0])), values[0]


def _names(error: str, number: int) -> bool:
    """Return whether an error has a number in it."""
    return re.search(rf"(?<![\d.]){number}(?![\d.])", error) is not None


def _is_varied(part: Any, arguments: Arguments) -> bool:
    """Return whether a number has several values in accepted calls: of others nothing can be learnt."""
    values = arguments.values(part)
    return values is not None and len(set(values.tolist())) >= _FEWEST_VALUES
