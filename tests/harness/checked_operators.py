"""Compare torch's own operators with their fake kernels, over the samples of ``op_db``.

``python tests/harness/checked_operators.py [--shard K/N] [--only NAME] [--samples N] [--runs N] [--scripts DIRECTORY]``

Each sample is traced with symbolic sizes; the operators of the trace run at sizes that its guards admit. Prints
each difference with its first call, and the totals.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import torch_fakeify as tfk
from torch_fakeify.frames.inputs.size_search import SizeSearch
from torch_fakeify.tools.operator_script import script_of_call
from torch_fakeify.tools.worker.fake_checks import FakeChecks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.tools.worker.replies import NodeDifference

INFOS = [*op_db, *custom_op_db]

KNOWN = {
    # Contiguous, where the real result is channels last as the input is.
    ("aten.max_unpool2d.default", "stride"),
    # With ``include_last_offset``: ``max_indices`` has an item too few for sums, ``bag_size`` one too many for means.
    ("aten._embedding_bag_forward_only.default", "size of result[3]"),
    ("aten._embedding_bag_forward_only.default", "size of result[2]"),
    # An operator of torch's tests: NumPy's product of integers and a float is of float64.
    ("_torch_testing.numpy_mul_scalar.default", "dtype"),
    # ``make_fx`` has written the number of the example into the trace.
    ("aten._local_scalar_dense.default", "number"),
}
"""Faults of torch 2.13: operator, and what is wrong first."""

_DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
"""The first two of these that an operator takes are tried."""


@dataclass
class Checked:
    """What became of some entries of ``op_db``."""

    differences: dict[tuple[str, str], NodeDifference] = field(default_factory=dict)
    """The first one by operator and what differs first."""
    compared: Counter[str] = field(default_factory=Counter[str])
    """Calls by entry."""
    not_compared: Counter[str] = field(default_factory=Counter[str])
    """Samples by reason."""


def check(infos: Sequence[Any], *, samples: int, runs: int) -> Checked:
    """Compare the operators of some entries, of each so many samples at so many sizes."""
    found = Checked()
    for info in infos:
        for traced in _frames(info, samples):
            if isinstance(traced, Exception):
                found.not_compared[_text(traced)] += 1
                continue
            try:
                checks = FakeChecks(traced, seed=0)
                sizes = itertools.islice(SizeSearch(traced.desc), runs)
                results = [checks.run(each, 0, io.BytesIO()) for each in sizes]
            except tfk.FakeifyError as error:
                found.not_compared[_text(error)] += 1
                continue
            for result in results:
                found.compared[info.full_name] += result.compared
                for each in result.differences:
                    first = each.parts[0]
                    what = f"{first.what} of result{first.part}" if first.part else first.what
                    target: Any = traced.desc.graph.nodes[each.position].target
                    found.differences.setdefault((target.name, what), each)
    return found


def _frames(info: Any, samples: int) -> Iterator[tfk.Capture | Exception]:
    """Trace an operator for each sample, or say why it is not traced."""
    dtypes = [each for each in _DTYPES if each in info.dtypes][:2]
    for dtype in dtypes or sorted(info.dtypes, key=str)[:1]:
        for sample in itertools.islice(info.sample_inputs("cpu", dtype), samples):
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def call(*tensors: Any, leaves: Any = leaves, at: Any = at, spec: Any = spec) -> Any:
                filled = [*leaves]
                for i, t in zip(at, tensors, strict=True):
                    filled[i] = t
                first, args, kwargs = tree_unflatten(filled, spec)
                return info.op(first, *args, **kwargs)

            try:
                gm = make_fx(call, tracing_mode="symbolic")(*(leaves[i] for i in at))
                fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
                yield tfk.capture(gm, fakes, constants="small")
            except Exception as error:  # noqa: BLE001 - counted with its kind
                yield error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def main() -> int:
    """Check a part of the operators, and print what differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--only")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scripts", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    number, count = map(int, args.shard.split("/"))
    infos = [each for each in INFOS if args.only in (None, each.name)][number::count]
    found = check(infos, samples=args.samples, runs=args.runs)
    for (name, what), each in found.differences.items():
        known = " (known)" if (name, what) in KNOWN else ""
        print(f"{name}: {'; '.join(map(str, each.parts))}{known}")
        if each.call is None:
            print(f"    no call: {each.no_call}")
            continue
        print(f"    {each.call.text}")
        for t in each.call.tensors:
            print(f"    {t.name}: {t.dtype} {t.size} strides {t.stride}")
        if args.scripts:
            args.scripts.mkdir(parents=True, exist_ok=True)
            file = args.scripts / f"{name}_{what}.py".replace(" ", "_")
            file.write_text(script_of_call(name, each.parts, each.call, ()))
    for text, n in found.not_compared.most_common(30):
        print(f"{n} samples not compared: {text}")
    nothing = [each.full_name for each in infos if not found.compared[each.full_name]]
    print(f"nothing compared of {len(nothing)}: {', '.join(nothing)}")
    total, differences = found.compared.total(), len(found.differences)
    print(f"{len(infos)} entries, {total} calls compared, {differences} differences")
    return int(not found.differences.keys() <= KNOWN)


if __name__ == "__main__":
    sys.exit(main())
