"""Infer a fake kernel from the calls of an operator."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat.torch_library import full_name
from torch_fakeify.errors import FakeKernelError
from torch_fakeify.records import fake_kernel as fk

from .evaluating import Evaluation, NoValueError, is_same_strides, result_of, value_text
from .exploring import Exploration
from .fitting import NoFitError, fit_results
from .kernels import FakeKernel, KernelReport
from .observed import TensorFacts
from .requirements import rank_limits, requirements
from .source import formula_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .exploring import Tried
    from .observed import Outcome
    from .specs import CallSpec

_CALLS = 300
"""Random calls before the first formula."""
_MORE = 400
"""Random calls that try to refute a formula."""
_ROUNDS = 25
"""Formulas that are refuted before a kernel is limited to fewer kinds of arguments."""
_FIRST_ROWS = 70
"""Calls to which the first formulas are fitted."""
_MOST_REFUTING = 8
"""Calls that are added when they refute a formula."""


def infer(
    schema: Any,
    run: Callable[[CallSpec], Outcome],
    samples: Sequence[CallSpec],
    *,
    sizes: Sequence[int] = (),
    seed: int = 0,
) -> FakeKernel:
    """Infer the fake kernel of an operator.

    Args:
        schema: of the operator.
        run: runs a call of it.
        samples: calls that it accepts.
        sizes: more sizes to try.
        seed: of the random calls.

    Raises:
        FakeKernelError: no sample is accepted, the results fit no formula, or the operator breaks its schema.
    """
    exploration = Exploration(run, samples, sizes=sizes, seed=seed)
    exploration.begin()
    accepted = [each for each in exploration.seen if each.outcome.results is not None]
    if not accepted:
        reasons = dict.fromkeys(each.outcome.error for each in exploration.seen)
        raise FakeKernelError(
            f"the operator {full_name(schema)} refuses every sample",
            expected="at least one call that works",
            found="; ".join(list(reasons)[:3]) or "no samples",
        )
    given = [each for each in accepted if each.spec in samples]
    exploration.draw(_CALLS)
    kernel = _surviving(schema, exploration, given)
    return FakeKernel(kernel, _report(kernel, exploration), schema)


def _surviving(
    schema: Any, exploration: Exploration, samples: Sequence[Tried]
) -> fk.FakeKernelDesc:
    """Return a kernel that agrees with all calls, also with those that are drawn to refute it.

    Where no formula fits, it refuses first tensors that are not contiguous, then other dtypes and
    numbers of dims than the samples have.
    """
    chosen: dict[int, Tried] = {}
    probed: set[Any] = set()
    limits: tuple[fk.Check, ...] = ()
    rounds = 0
    while True:
        seen = exploration.seen
        if not chosen:
            chosen, rounds = _varied(seen, limits), 0
        try:
            kernel = _fitted(schema, seen, list(chosen.values()), limits, samples)
        except NoFitError as error:
            reason = error
        else:
            for check in kernel.checks:
                if check.condition not in probed:
                    probed.add(check.condition)
                    exploration.probe(list(_integers_of(check.condition)))
            wrong = _disagreeing(kernel, seen, chosen, limits)
            if not wrong:
                exploration.draw(_MORE)
                wrong = _disagreeing(kernel, seen, chosen, limits)
            if not wrong:
                return kernel
            chosen.update(wrong)
            rounds += 1
            if rounds < _ROUNDS:
                continue
            reason = _refuted(kernel, next(iter(wrong.values())))
        narrower = _narrower(limits, reason, samples)
        if narrower is None:
            break
        limits, chosen = narrower, {}
    raise FakeKernelError(
        f"no fake kernel can be inferred for the operator {full_name(schema)}",
        expected="results whose sizes, strides and dtypes follow from those of the arguments",
        found=f"{reason}, in {len(chosen)} calls",
        fix="Write one with torch.library.register_fake, or give more samples",
    ) from reason


def _refuted(kernel: fk.FakeKernelDesc, seen: Tried) -> NoFitError:
    """Return which part of a kernel a call refutes."""
    kind = "size"
    with contextlib.suppress(NoValueError):
        expected = predicted(kernel, seen.outcome.args, seen.outcome.results)
        for part, found in zip(expected, seen.outcome.results or [], strict=False):
            if isinstance(part, TensorFacts) and isinstance(found, TensorFacts):
                if part.size == found.size and part.dtype != found.dtype:
                    kind = "dtype"
                elif part.size == found.size:
                    kind = "layout"
    return NoFitError("each formula was refuted by another call", kind)


def _narrower(
    limits: tuple[fk.Check, ...], error: NoFitError, samples: Sequence[Tried]
) -> tuple[fk.Check, ...] | None:
    """Return more limits for a kernel, or ``None`` if there are no others."""
    tensors: dict[fk.Arg, list[TensorFacts]] = {}
    lengths: dict[str, set[int]] = {}
    for each in samples:
        for name, value in each.outcome.args.items():
            if isinstance(value, TensorFacts):
                tensors.setdefault(fk.Arg(name), []).append(value)
            elif isinstance(value, list):
                lengths.setdefault(name, set()).add(len(value))
    steps = {
        "layout": [fk.IsContiguous(of) for of in tensors],
        "dtype": [
            fk.DtypeIn(of, tuple(sorted({each.dtype for each in facts})))
            for of, facts in tensors.items()
        ],
        "size": [
            limit
            for of, facts in tensors.items()
            for ranks in [{len(each.size) for each in facts}]
            for limit in rank_limits(of, min(ranks), max(ranks))
        ]
        + [
            fk.Compared("==", fk.Length(name), fk.Integer(*n))
            for name, n in lengths.items()
            if len(n) == 1
        ],
    }
    known = {each.condition for each in limits}
    order = [error.kind, "layout", "size", "dtype"]
    for kind in order:
        more = [each for each in steps.get(kind, []) if each not in known]
        if more:
            return (*limits, *(fk.Check(condition=each) for each in more))
    return None


def _is_within(limits: Sequence[fk.Check], each: Tried) -> bool:
    """Return whether a call is one that a kernel with limits has to know."""
    evaluation = Evaluation(each.outcome.args)
    return all(evaluation.allows(limit.condition) for limit in limits)


def _varied(seen: Sequence[Tried], limits: Sequence[fk.Check]) -> dict[int, Tried]:
    """Return some accepted calls by position, as different from one another as can be."""
    groups: dict[Any, list[int]] = {}
    for at, each in enumerate(seen):
        if each.outcome.results is not None and _is_within(limits, each):
            groups.setdefault(_look(each.outcome.args), []).append(at)
    in_turn = chain.from_iterable(
        zip_longest(*groups.values())
    )  # one of each group, again and again
    chosen = [at for at in in_turn if at is not None]
    return {at: seen[at] for at in chosen[:_FIRST_ROWS]}


def _look(value: Any) -> Any:
    """Return what kind of value an argument is: the number of dims, a flag, whether it is ``None``."""
    if isinstance(value, dict):
        return tuple((name, _look(each)) for name, each in value.items())
    if isinstance(value, list):
        return tuple(map(_look, value)) if len(value) < 4 else len(value)
    if isinstance(value, TensorFacts):
        return len(value.size)
    return value if isinstance(value, (bool, str, type(None))) else type(value).__name__


def _disagreeing(
    kernel: fk.FakeKernelDesc,
    seen: Sequence[Tried],
    chosen: Mapping[int, Tried],
    limits: Sequence[fk.Check],
) -> dict[int, Tried]:
    """Return the first calls that a kernel is wrong about, by position."""
    found: dict[int, Tried] = {}
    for at, each in enumerate(seen):
        if at not in chosen and _is_within(limits, each) and not _agrees(kernel, each):
            found[at] = each
            if len(found) >= _MOST_REFUTING:
                break
    return found


def _fitted(
    schema: Any,
    seen: Sequence[Tried],
    chosen: Sequence[Tried],
    limits: tuple[fk.Check, ...],
    samples: Sequence[Tried],
) -> fk.FakeKernelDesc:
    """Return a kernel that agrees with the chosen calls; `NoFitError` if there is none."""
    accepted = [
        each for each in seen if each.outcome.results is not None and _is_within(limits, each)
    ]
    _check_schema(schema, accepted)
    found, sizes = fit_results(
        [each.outcome.args for each in chosen], [each.outcome.results or [] for each in chosen]
    )
    refused = [
        each
        for each in seen
        if each.outcome.results is None and each.outcome.args and _is_within(limits, each)
    ]
    checks = requirements(
        [each.outcome.args for each in accepted],
        [each.outcome.args for each in refused],
        [each.outcome.error for each in refused],
        [each.outcome.args for each in samples],
    )
    return fk.FakeKernelDesc(
        operator=full_name(schema),
        arguments=tuple(each.name for each in schema.arguments),
        keywords=sum(each.kwarg_only for each in schema.arguments),
        checks=(*limits, *_only_values(accepted), *checks),
        sizes=sizes,
        results=found,
    )


def _only_values(accepted: Sequence[Tried]) -> list[fk.Check]:
    """Return limits to the values of flags, words and missing arguments that never had another one."""
    values: dict[str, set[str]] = {}
    for each in accepted:
        for name, value in each.outcome.args.items():
            values.setdefault(name, set()).add(value_text(value))
    kinds = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    return [
        fk.Check(condition=fk.Seen(name, text))
        for name, text in kinds.items()
        if text in ("None", "True", "False") or text[0] in "'\"" or text.startswith("torch.")
    ]


def _integers_of(part: Any) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield the sizes and numbers in a condition: argument, position in a list, dim."""
    match part:
        case fk.Size(of=of, dim=dim):
            yield of.name, of.item, dim
        case fk.Number(of=of):
            yield of.name, of.item, None
        case fk.Compared(left=left, right=right) | fk.Binary(left=left, right=right):
            yield from _integers_of(left)
            yield from _integers_of(right)
        case _:
            return


def _agrees(kernel: fk.FakeKernelDesc, seen: Tried) -> bool:
    if seen.outcome.results is None:
        return True
    try:
        expected = predicted(kernel, seen.outcome.args, seen.outcome.results)
    except NoValueError:
        return False
    return same_results(expected, seen.outcome.results)


def _check_schema(schema: Any, accepted: Sequence[Tried]) -> None:
    """Check that no call wrote into an argument, or returned a view, that the schema does not name."""
    aliased = {each.name for each in schema.arguments if each.alias_info is not None}
    for each in accepted:
        if each.outcome.written:
            raise FakeKernelError(
                f"the operator {full_name(schema)} breaks its schema",
                expected=f"no write into {', '.join(each.outcome.written)}: {schema}",
                found="its data changed",
                fix="Name it in mutates_args, or write Tensor(a!) in the schema",
            )
        for result in each.outcome.results or []:
            for part in result if isinstance(result, list) else [result]:
                shares = getattr(part, "shares", None)
                if shares is not None and shares[0] not in aliased:
                    raise FakeKernelError(
                        f"the operator {full_name(schema)} breaks its schema",
                        expected=f"results with a storage of their own: {schema}",
                        found=f"a result shares the storage of {shares[0]}",
                        fix="Return a clone, or write Tensor(a) in the schema",
                    )


def _report(kernel: fk.FakeKernelDesc, exploration: Exploration) -> KernelReport:
    seen = exploration.seen
    refused = [each for each in seen if each.outcome.results is None and each.outcome.args]
    unexplained: Counter[str] = Counter()
    for each in refused:
        with contextlib.suppress(NoValueError):
            predicted(kernel, each.outcome.args, None)
            unexplained[each.outcome.error] += 1
    guesses = [
        f"a size that depends on data is at most {formula_text(each.upper)}"
        for each in kernel.sizes
        if each.upper is not None
    ]
    if exploration.has_stopped:
        guesses.append("few calls were made, as the operator did not survive several")
    return KernelReport(
        kernel.operator,
        accepted=sum(each.outcome.results is not None for each in seen),
        refused=len(refused),
        unexplained=tuple(f"{text} ({count})" for text, count in unexplained.most_common()),
        guesses=tuple(guesses),
        limits=tuple(formula_text(each.condition) for each in kernel.checks if not each.message),
        is_random=exploration.is_random,
        ended=tuple(dict.fromkeys(e.outcome.error for e in seen if not e.outcome.has_survived)),
    )


# --- prediction -------------------------------------------------------------------------------------


class _Unknown:
    """A size that depends on data, before it is known."""

    def __init__(self, at: int) -> None:
        self.at = at


def predicted(
    kernel: fk.FakeKernelDesc, args: dict[str, Any], actual: Sequence[Any] | None
) -> list[Any]:
    """Return the results of a call by a kernel; `NoValueError` if the kernel refuses it.

    Args:
        kernel: the kernel.
        args: the observed arguments.
        actual: what the call gave, for the sizes that depend on data; ``None`` if it raised.
    """
    sizes: list[Any] = [0] * len(kernel.sizes)
    if kernel.sizes and actual is not None:
        sizes = _bound(kernel, args, actual)
    evaluation = Evaluation(args, None, sizes)
    for check in kernel.checks:
        if not evaluation.allows(check.condition):
            raise NoValueError(f"not {formula_text(check.condition)}")
    return [result_of(part, evaluation, _facts) for part in kernel.results]


def _bound(kernel: fk.FakeKernelDesc, args: dict[str, Any], actual: Sequence[Any]) -> list[Any]:
    """Return the sizes that depend on data, from where they stand alone in a result."""
    sizes: list[Any] = [_Unknown(at) for at in range(len(kernel.sizes))]
    evaluation = Evaluation(args, None, sizes)
    for part, value in zip(kernel.results, actual, strict=True):
        try:
            expected = result_of(part, evaluation, partial(_facts, has_strides=False))
        except (NoValueError, TypeError, AssertionError):  # torch refuses what is no number
            continue
        if isinstance(expected, _Unknown):
            sizes[expected.at] = value
        if isinstance(expected, TensorFacts) and isinstance(value, TensorFacts):
            for size, number in zip(expected.size, value.size, strict=False):
                if isinstance(size, _Unknown):
                    sizes[size.at] = number
    return [0 if isinstance(each, _Unknown) else each for each in sizes]


def _facts(part: Any, evaluation: Evaluation, *, has_strides: bool = True) -> TensorFacts:
    """Return the metadata of a new tensor, a view or an argument itself."""
    if isinstance(part, fk.NewTensor):
        sizes = evaluation.ints(part.size)
        if has_strides and any(each < 0 for each in sizes):
            raise NoValueError("a negative size")
        stride = evaluation.strides(part.layout, sizes) if has_strides else ()
        dtype, device = evaluation.dtype(part.dtype), evaluation.device(part.device)
        return TensorFacts(sizes, stride, 0, dtype, device)
    found = evaluation.tensor(part.of)
    size, stride, offset = found.size, found.stride, found.offset
    if isinstance(part, fk.View):
        size, stride = evaluation.ints(part.size), evaluation.ints(part.stride)
        offset = evaluation.int(part.offset)
    return TensorFacts(
        size, stride, offset, found.dtype, found.device,
        shares=(part.of.name, part.of.item), is_argument=isinstance(part, fk.SameTensor),
    )  # fmt: skip


def same_results(expected: Any, found: Any) -> bool:
    """Return whether two results have the same metadata."""
    if isinstance(expected, TensorFacts) and isinstance(found, TensorFacts):
        return (
            tuple(expected.size) == tuple(found.size)
            and is_same_strides(found.size, expected.stride, found.stride)
            and expected.dtype == found.dtype
            and expected.device == found.device
            and expected.layout == found.layout
            and expected.shares == found.shares
            and (expected.shares is None or expected.offset == found.offset)
        )
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(map(same_results, expected, found))
    return type(expected) is type(found) and expected == found
