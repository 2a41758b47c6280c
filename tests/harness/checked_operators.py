"""Compare torch's own operators with their fake kernels, over the samples of ``op_db``.

``python tests/harness/checked_operators.py [--shard K/N] [--only NAME] [--samples N] [--runs N] [--scripts DIRECTORY]``

Each sample is traced with symbolic sizes; the operators of the trace run at sizes that its guards admit. Prints
a line for each operator that differs from its fake kernel, with its first call, and the totals.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
import warnings
from collections import Counter
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
    from collections.abc import Iterator

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
"""The first two of these that an operator takes are tried."""


def frames_of(info: Any, samples: int) -> Iterator[tuple[str, tfk.Capture]]:
    """Trace an operator for each sample, with what the sample is."""
    dtypes = [each for each in DTYPES if each in info.dtypes][:2]
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

            tensors = [leaves[i] for i in at]
            try:
                gm = make_fx(call, tracing_mode="symbolic")(*tensors)
                fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
                yield f"{info.full_name} {dtype}", tfk.capture(gm, fakes, constants="small")
            except Exception as error:  # noqa: BLE001 - counted with its kind
                yield f"{type(error).__name__}: {str(error).splitlines()[0][:120]}", None


def main() -> int:
    """Run the samples of a part of the operators."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--only")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scripts", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    number, count = map(int, args.shard.split("/"))
    infos = [each for each in [*op_db, *custom_op_db] if args.only in (None, each.name)]
    found: dict[tuple[str, str], Any] = {}
    compared: Counter[str] = Counter()
    untraced: Counter[str] = Counter()
    began = time.time()
    for info in infos[number::count]:
        for text, frame in frames_of(info, args.samples):
            if frame is None:
                untraced[text] += 1
                continue
            try:
                checks = FakeChecks(frame, seed=0)
                results = [
                    checks.run(sizes, 0, io.BytesIO())
                    for sizes in itertools.islice(SizeSearch(frame.desc), args.runs)
                ]
            except Exception as error:  # noqa: BLE001 - counted with its kind
                untraced[f"{text}: {type(error).__name__}: {str(error)[:200]}"] += 1
                continue
            for result in results:
                compared[info.full_name] += result.compared
                for each in result.differences:
                    node = frame.desc.graph.nodes[each.position]
                    name = getattr(node.target, "name", str(node.target))
                    what = "; ".join(sorted({part.what for part in each.parts}))
                    if (name, what) not in found:
                        found[name, what] = each
                        call = each.call
                        print(f"{name}: {'; '.join(map(str, each.parts))}  [{text}]")
                        print("    " + ("no call: " + each.no_call if call is None else call.text))
                        for t in () if call is None else call.tensors:
                            print(f"    {t.name}: {t.dtype} {t.size} strides {t.stride}")
                        sys.stdout.flush()
                        if args.scripts and call is not None:
                            file = args.scripts / f"{name}_{what}.py".replace(" ", "_")
                            file.write_text(script_of_call(name, each.parts, call, ()))
    for text, n in untraced.most_common(30):
        print(f"  {n} not compared: {text}")
    zero = [info.full_name for info in infos[number::count] if not compared[info.full_name]]
    print(f"nothing compared of {len(zero)}: {', '.join(zero)}")
    print(
        f"{len(infos[number::count])} entries, {compared.total()} calls compared, {len(found)} differences, "
        f"{time.time() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
