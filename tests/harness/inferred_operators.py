"""Hide torch's own fake kernels, infer them, and compare the two on other samples.

``python tests/harness/inferred_operators.py [--only TEXT] [--shard 0/4]`` prints a line
for each operator of ATen that `op_db` calls, and the share whose inferred kernel equals torch's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from typing import Any

import torch
from inferred_checks import faked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fakeify.errors import FakeKernelError
from torch_fakeify.fake_kernels.evaluating import NoValueError, bound
from torch_fakeify.fake_kernels.exploring import Exploration
from torch_fakeify.fake_kernels.inferring import infer, predicted, same_results
from torch_fakeify.fake_kernels.observed import NamedValue, TensorFacts
from torch_fakeify.fake_kernels.specs import CallSpec, TensorSpec, facts_of, spec_of, tensors_of
from torch_fakeify.tools.infer_fakes import OperatorProcess

_GIVEN = 12
_SAMPLES = 24
"""Most samples of an operator of `op_db`."""


class _Calls(TorchDispatchMode):
    """Collects the calls of ATen operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)


def is_wanted(op: Any) -> bool:
    """Return whether an operator is functional, deterministic, and returns strided tensors that are new or views."""
    schema = op._schema
    return (
        not schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and any("Tensor" in str(each.type) for each in schema.returns)
        and all(each.alias_info is None for each in schema.returns)
        and any("Tensor" in str(each.type) for each in schema.arguments)
        and op.namespace == "aten"
    )


def collected(only: str = "") -> dict[Any, list[CallSpec]]:
    """Return the different calls of each operator of ATen that the samples of `op_db` make."""
    found: dict[Any, dict[bytes, CallSpec]] = {}
    for info in op_db:
        if torch.float32 not in info.dtypes:
            continue
        samples = info.sample_inputs("cpu", torch.float32, requires_grad=False)
        for at, sample in enumerate(samples):
            if at >= _SAMPLES:
                break
            mode = _Calls()
            with contextlib.suppress(Exception), torch.no_grad(), mode:
                info.op(sample.input, *sample.args, **sample.kwargs)
            for op, args, kwargs in mode.calls:
                if not is_wanted(op) or (only and only not in str(op)):
                    continue
                with contextlib.suppress(Exception):
                    given = bound(op._schema, args, kwargs)
                    if has_number_for_tensor(op._schema, given):
                        continue
                    spec = CallSpec({name: spec_of(value) for name, value in given.items()})
                    found.setdefault(op, {}).setdefault(repr(spec).encode(), spec)
    return {
        op: list(specs.values()) for op, specs in sorted(found.items(), key=lambda x: str(x[0]))
    }


def has_number_for_tensor(schema: Any, given: dict[str, Any]) -> bool:
    """Return whether a tensor of the schema is a Python number in a call, as that of ``x + 1``."""
    tensors = [each.name for each in schema.arguments if str(each.type) == "Tensor"]
    return any(not isinstance(given[name], torch.Tensor) for name in tensors)


def torchs_own(op: Any, args: dict[str, Any]) -> Any:
    """Return the results of torch's own fake kernel, with unbacked sizes as ``None``."""
    from torch_fakeify.fake_kernels.specs import built, passed

    generator = torch.Generator().manual_seed(0)
    made = {name: built(value, generator) for name, value in args.items()}
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = {name: faked(mode, value) for name, value in made.items()}
    positional, keywords = passed(op._schema, fakes)
    with mode, torch.no_grad():
        result = op(*positional, **keywords)
    count = len(op._schema.returns)
    results = [result] if count == 1 else list(result)
    return [facts_of(each, list(tensors_of(fakes))) for each in results]


def without_data_sizes(own: Any, real: Any) -> Any:
    """Return torch's results with the real sizes where its own depend on data."""
    if isinstance(own, TensorFacts) and isinstance(real, TensorFacts):
        if any(isinstance(size, torch.SymInt) for size in own.size):
            same = all(
                isinstance(a, torch.SymInt) or a == b
                for a, b in zip(own.size, real.size, strict=True)
            )
            return real if same else own
        return own
    if isinstance(own, (list, tuple)):
        return [without_data_sizes(a, b) for a, b in zip(own, real, strict=True)]
    return own


def compared(op: Any, specs: list[CallSpec]) -> tuple[str, str]:
    """Infer the kernel of an operator from some of its calls, and compare it with torch's on the others."""
    with OperatorProcess(op) as run:
        return compared_by(run, op, specs)


def covering(specs: list[CallSpec]) -> list[CallSpec]:
    """Return at most 12 calls that have every flag, word, dtype, kind and number of dims of all of them, as a person would give."""
    looks = [{(name, look(value)) for name, value in spec.args.items()} for spec in specs]
    chosen: list[int] = []
    covered: set[Any] = set()
    while len(chosen) < min(_GIVEN, len(specs)):
        at = max(range(len(specs)), key=lambda i: (i not in chosen, len(looks[i] - covered), -i))
        if looks[at] <= covered and len(chosen) >= len(specs) // 2:
            break
        chosen.append(at)
        covered |= looks[at]
    return [specs[at] for at in chosen]


def look(value: Any) -> Any:
    """Return what kind of value an argument is."""
    if isinstance(value, TensorSpec):
        return value.dtype, len(value.size)
    if isinstance(value, list):
        return len(value), *{look(each) for each in value}
    is_word = isinstance(value, (bool, str, type(None), NamedValue))
    return repr(value) if is_word else type(value).__name__


def drawn(run: Any, given: list[CallSpec]) -> list[CallSpec]:
    """Return calls of other sizes, where all samples were given."""
    exploration = Exploration(run, given, seed=99)
    exploration.begin()
    exploration.draw(60)
    found = [each for each in exploration.seen if each.outcome.results is not None]
    return [each.spec for each in found if each.spec not in given][-24:]


def compared_by(run: Any, op: Any, specs: list[CallSpec]) -> tuple[str, str]:
    """Do so, with a function that runs calls."""
    accepted = [spec for spec in specs if run(spec).results is not None]
    if not accepted:
        return "no sample", ""
    given = covering(accepted)
    others = [each for each in accepted if each not in given] or drawn(run, given)
    try:
        inferred = infer(op._schema, run, given)
    except FakeKernelError as error:
        kind = "breaks schema" if "breaks its schema" in str(error) else "not inferred"
        return kind, str(error)
    refused, reason = 0, ""
    for spec in others:
        real = run(spec)
        try:
            own = without_data_sizes(torchs_own(op, spec.args), real.results)
        except Exception as error:  # noqa: BLE001 - torch has no fake result for it
            return "torch has none", f"{type(error).__name__}: {error}"
        try:
            found = predicted(inferred.desc, real.args, real.results)
        except NoValueError as error:
            refused += 1
            reason = str(error)
            continue
        if not same_results(found, own):
            if not same_results(own, real.results):
                continue  # torch's own kernel is not what the operator does
            return "differs", f"{real.args}: {found}, torch {own}"
    if refused:
        return "refuses", f"{refused} of {len(others)} samples: {reason}"
    return "equal", ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    index, _, count = options.shard.partition("/")
    counts: Counter[str] = Counter()
    for at, (op, specs) in enumerate(collected(options.only).items()):
        if at % int(count) != int(index):
            continue
        started = time.perf_counter()
        try:
            kind, text = compared(op, specs)
        except Exception as error:
            if options.verbose:
                raise
            kind, text = "fault", f"{type(error).__name__}: {error}"
        counts[kind] += 1
        took = time.perf_counter() - started
        sys.stdout.write(f"{kind:13} {op} {len(specs)} {took:.1f} s {text[:600]}\n")
        sys.stdout.flush()
    total = sum(
        count
        for kind, count in counts.items()
        if kind not in ("torch has none", "no sample", "breaks schema")
    )
    sys.stdout.write(
        f"{dict(counts)}: {counts['equal']} of {total} equal, {100 * counts['equal'] / max(total, 1):.1f} %\n"
    )


if __name__ == "__main__":
    main()
