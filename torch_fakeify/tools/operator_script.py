"""A script of torch alone that calls one operator on real and on fake tensors, and compares the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_fakeify.fake_kernels.evaluating import contiguous_strides
from torch_fakeify.tools.minify.repro_script import BackendCode
from torch_fakeify.tools.minify.script_code import filled, with_gradient
from torch_fakeify.tools.value_code import tuple_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.tools.worker.replies import OperatorCall, Parted, TensorArgument

_WHOLE = ("int", "uint", "bool")


def script_of_call(
    operator: str, parts: Sequence[Parted], call: OperatorCall, imports: Sequence[str]
) -> str:
    """Return the script of a call whose results differ in some parts; it first imports some modules."""
    what = "\n".join(map(str, parts)).replace("\\", "\\\\").replace('"""', "'''")
    names = ", ".join(each.name for each in call.tensors)
    lines = [
        f'"""The fake kernel of {operator} differs from the operator.\n\n{what}\n"""\n',
        *call.imports,
        *_IMPORTS,
        "",
        *BackendCode("eager", tuple(imports)).lines(),
        "",
        "",
        "def arguments():",
        "    torch.manual_seed(0)",
        *(f"    {line}" for line in _tensors(call.tensors)),
        f"    return [{names}]",
        "",
        "",
        f"def call({names}):",
        f"    return {call.text}",
        "",
        "",
        *_MAIN,
    ]
    return "\n".join(lines) + "\n"


def _tensors(tensors: Sequence[TensorArgument]) -> Iterator[str]:
    shared = [each.storage for each in tensors]
    made: set[int] = set()
    for each in tensors:
        storage = f"storage_{each.storage}"
        if shared.count(each.storage) > 1 and each.storage not in made:
            made.add(each.storage)
            yield f"{storage} = {_data(each, f'({each.elements},)', 1)}.to({each.device!r})"
        yield f"{each.name} = {_tensor(each, storage if each.storage in made else '')}"


def _tensor(each: TensorArgument, storage: str) -> str:
    size, stride = (tuple_code(map(str, n)) for n in (each.size, each.stride))
    if storage:
        text = f"{storage}.view(torch.{each.dtype}).as_strided({size}, {stride}, {each.offset})"
    elif each.offset or not _is_row_major(each):
        elements = _data(each, f"({each.elements},)", 1)
        if each.numbers is not None:
            elements = f"torch.empty({each.elements}, dtype=torch.{each.dtype})"
        text = f"{elements}.as_strided({size}, {stride}, {each.offset})"
        if each.numbers is not None:
            text += f".copy_(torch.tensor({each.numbers!r}))"
    elif each.numbers is not None:
        text = f"torch.tensor({each.numbers!r}).to(torch.{each.dtype})"
        text += f".view({size})" if 0 in each.size else ""
    else:
        text = _data(each, size, len(each.size))
    if each.device != "cpu" and not storage:
        text += f".to({each.device!r})"
    return with_gradient(text, each)


def _data(each: TensorArgument, size: str, ndim: int) -> str:
    """Write random data, whole numbers as large as those of the call."""
    if each.dtype.startswith(_WHOLE) and each.dtype != "bool" and (each.low, each.high) != (0, 1):
        return f"torch.randint({each.low}, {each.high + 1}, {size}).to(torch.{each.dtype})"
    return filled(each.dtype, size, ndim)


def _is_row_major(each: TensorArgument) -> bool:
    dims = zip(each.size, each.stride, contiguous_strides(each.size), strict=True)
    return all(n == 1 or step == expected for n, step, expected in dims)


_IMPORTS = """\
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves""".splitlines()

_MAIN = '''\
def facts(result, tensors):
    """What a compiler plans by."""
    storages = {x.untyped_storage()._cdata: at for at, x in reversed(list(enumerate(tensors)))}
    found = []
    for x in tree_leaves(result):
        if not isinstance(x, torch.Tensor):
            found.append({"value": x})
            continue
        storage = x.untyped_storage()
        argument = storages.get(storage._cdata)
        found.append(
            {
                "size": list(x.shape),
                "stride": list(x.stride()),
                "offset": x.storage_offset(),
                "dtype": x.dtype,
                "device": x.device.type,
                "layout": x.layout,
                "requires_grad": x.requires_grad,
                "storage of argument": argument,
                "bytes": storage.nbytes() if argument is None else None,
            }
        )
    return found


def is_same(fake, real, values):
    """Compare; strides of dims of size 1, and those of empty tensors, do not count."""
    sizes = real.get("size", [])
    if fake.keys() != real.keys() or len(fake.get("size", [])) != len(sizes):
        return False
    pairs = list(zip(fake.get("size", []), sizes))  # the first, as they have symbols alone
    pairs += [(fake[key], real[key]) for key in fake if key not in ("size", "stride", "offset")]
    if sizes and 0 not in sizes:
        strides = zip(fake["stride"], real["stride"], sizes)
        pairs += [(a, b) for a, b, n in strides if n > 1]
        pairs.append((fake["offset"], real["offset"]))
    return all(is_same_number(a, b, values) for a, b in pairs)


def is_same_number(fake, real, values):
    """Compare; a symbol, which depends on data, has the first real number in its place."""
    if not isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return fake == real
    expr = fake.node.expr
    if expr.is_Symbol and values.setdefault(expr, real) == real:
        return real in fake.node.shape_env.var_to_range[expr]
    return bool(expr.xreplace(values) == real)


inputs = arguments()
mode = FakeTensorMode(shape_env=ShapeEnv())
fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
with mode, enable_python_dispatcher():
    fake = facts(call(*fakes), fakes)
real = facts(call(*inputs), inputs)
values = {}
for a, b in zip(fake, real):
    print("fake:", a)
    print("real:", b)
assert len(fake) == len(real), "fake and real results have different lengths"
assert all(is_same(a, b, values) for a, b in zip(fake, real)), "fake and real results differ"'''.splitlines()
