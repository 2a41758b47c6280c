"""A fake kernel that was inferred: it makes fake results, registers itself, and prints its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torch_fakeify.compat import torch_library
from torch_fakeify.errors import FakeKernelError
from torch_fakeify.records import fake_kernel as fk

from .evaluating import Evaluation, NoValueError, bound, dtype_named, result_of
from .source import formula_text, kernel_source
from .specs import facts_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


INFERRED: dict[str, fk.FakeKernelDesc] = {}
"""The fake kernels that this process registered or used in a trace, by operator; captures have them."""


def note_inferred(desc: fk.FakeKernelDesc) -> None:
    """Have captures carry a fake kernel, without the operator's messages, which may mention files."""
    plain = "the operator raises"
    checks = [msgspec.structs.replace(e, message=plain) if e.message else e for e in desc.checks]
    INFERRED[desc.operator] = msgspec.structs.replace(desc, checks=tuple(checks))


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise NoValueError(f"{name} is no device") from error


@dataclass(frozen=True)
class KernelReport:
    """What an inferred fake kernel rests on.

    Example:
        >>> @torch.library.custom_op("docs::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.cat([x, x])
        >>> tfk.infer_fake(twice, [(torch.ones(3, 2),)]).report.refused > 0
        True
    """

    operator: str
    accepted: int
    """Calls with made-up arguments that the operator accepted; the kernel agrees with each of them."""
    refused: int
    """Calls that it refused."""
    unexplained: tuple[str, ...] = ()
    """What it raised in calls that the kernel accepts, with the number of such calls."""
    guesses: tuple[str, ...] = ()
    """What holds in all calls, but need not always hold."""
    limits: tuple[str, ...] = ()
    """Conditions without which no formula was found: other arguments are refused by the kernel."""
    is_random: bool = False
    """Whether equal calls gave different data."""
    ended: tuple[str, ...] = ()
    """How the processes ended that the operator did not survive."""

    def lines(self) -> list[str]:
        """Format the report."""
        found = [
            f"{self.operator}: agrees with {self.accepted} calls; {self.refused} others were refused"
        ]
        found += [f"  guess: {text}" for text in self.guesses]
        found += [f"  no formula unless {text}" for text in self.limits]
        found += [f"  no check for: {text}" for text in self.unexplained[:4]]
        found += ["  equal calls give different data"] if self.is_random else []
        found += [f"  a call was not survived: {text}" for text in self.ended]
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, repr=False)
class FakeKernel:
    """A fake kernel that was inferred from calls of the operator.

    Called with fake tensors it returns fake results, as a function given to
    ``torch.library.register_fake`` does.

    Example:
        >>> @torch.library.custom_op("docs::diagonals", mutates_args=())
        ... def diagonals(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.diag_embed(x)
        >>> kernel = tfk.infer_fake(diagonals, [(torch.ones(3, 2),)])
        >>> print(kernel.source.splitlines()[-1].strip())
        return x.new_empty([*x.shape, x.shape[-1]])
    """

    desc: fk.FakeKernelDesc
    """The formulas."""
    report: KernelReport
    """What they rest on."""
    _schema: Any = field(compare=False)

    @property
    def source(self) -> str:
        """The kernel as a function in plain torch that registers itself."""
        return kernel_source(self.desc, self._schema)

    def register(self) -> None:
        """Register the kernel with torch for the rest of the process.

        Raises:
            FakeKernelError: the operator has a fake kernel.
        """
        try:
            torch.library.register_fake(self.desc.operator, self)
        except RuntimeError as error:
            raise FakeKernelError(
                f"the fake kernel of {self.desc.operator} cannot be registered",
                found=str(error).partition("\n")[0],
            ) from error
        note_inferred(self.desc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the fake results of a call.

        Raises:
            FakeKernelError: the call is unlike those from which the kernel was inferred.
        """
        return fake_results(self.desc, self._schema, args, kwargs)

    def __repr__(self) -> str:
        return f"<FakeKernel {self.desc.operator}: {self.report.accepted} calls>"


def fake_results(
    desc: fk.FakeKernelDesc, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the results of a call with fake tensors; `FakeKernelError` if there is no formula for it."""
    given = bound(schema, args, kwargs)
    tensors = dict(tensors_of(given))
    facts = {name: facts_of(value) for name, value in given.items()}
    try:
        before = Evaluation(facts, tensors=tensors)
        for check in desc.checks:
            _check(check, before)
        sizes = _data_sizes(desc, before)
        evaluation = Evaluation(facts, None, sizes, tensors)
        results = [result_of(part, evaluation, _made) for part in desc.results]
    except (NoValueError, OverflowError) as error:
        raise FakeKernelError(
            f"the inferred fake kernel of {desc.operator} has no result for this call",
            expected="arguments like those of the samples",
            found=str(error),
            fix="Give infer_fake a sample like it",
        ) from error
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _check(check: fk.Check, evaluation: Evaluation) -> None:
    """Check what the operator requires; what the call has no tensor or number for holds."""
    condition = check.condition
    try:
        holds = evaluation.feature(condition)
    except NoValueError:
        return
    text = formula_text(condition)
    if isinstance(condition, fk.Compared) and check.message:
        torch._check(holds, lambda: f"{text}: {check.message}")
    elif not holds:
        raise NoValueError(f"not {text}{f' ({check.message})' if check.message else ''}")


def _data_sizes(desc: fk.FakeKernelDesc, evaluation: Evaluation) -> list[Any]:
    """Return new unbacked sizes, with what is known of them."""
    found: list[Any] = []
    for each in desc.sizes:
        size = torch_library.result_context().new_dynamic_size(min=each.lower)
        if each.upper is not None:
            torch._check(size <= evaluation.int(each.upper))
        found.append(size)
    return found


def _made(part: Any, evaluation: Evaluation) -> Any:
    """Make a new fake tensor, a view or an argument itself."""
    match part:
        case fk.NewTensor(size=size, layout=layout, dtype=dtype, device=device):
            sizes = evaluation.ints(size)
            options: dict[str, Any] = {
                "dtype": dtype_named(evaluation.dtype(dtype)),
                "device": _device(evaluation.device(device)),
            }
            if isinstance(layout, fk.Contiguous):
                return torch.empty(sizes, **options)
            return torch.empty_strided(sizes, evaluation.strides(layout, sizes), **options)
        case fk.View(of=of, size=size, stride=stride, offset=offset):
            found = evaluation.real(of)
            assert found is not None
            return found.as_strided(
                evaluation.ints(size), evaluation.ints(stride), evaluation.int(offset)
            )
        case _:
            return evaluation.real(part.of)
