"""The drop-in: what torch's converter and describer give, ours give in their place."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import os
import re
import subprocess
import sys
import types
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._subclasses.meta_utils as meta_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import tensor_groups
from test_convert import assert_same, contexts, in_place, relations
from torch._dynamo import trace_rules
from torch._dynamo.source import AttrSource, LocalSource
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx import _graph_pickler
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SubclassSymbolicContext,
    uninteresting_files,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from torch_fakeify import dropin, dropin_convert, dropin_desc, dropin_describe, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

# torch's own describer asks for the gradient of non-leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]

NAMES = ("MetaConverter", "MetaStorageDesc", "MetaTensorDesc", "MetaTensorDescriber")
OURS = {
    "MetaConverter": dropin_convert.MetaConverter,
    "MetaStorageDesc": dropin_desc.MetaStorageDesc,
    "MetaTensorDesc": dropin_desc.MetaTensorDesc,
    "MetaTensorDescriber": dropin_describe.MetaTensorDescriber,
}
PRIVATE_STEPS = {"_empty_create_subclass", "__class_getitem__", "__init_subclass__"}
"""Methods that nobody outside torch's class calls, and what the language gives a class."""
TORCHS = {name: getattr(meta_utils, name) for name in NAMES}


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    """Each test begins and ends without the drop-in."""
    assert not dropin.is_installed()
    yield
    dropin.uninstall()


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function gives with the drop-in and without; or the exceptions."""
    found: list[Any] = []
    for place in (dropin.installed(), nullcontext()):
        FakeTensorMode.cache_clear()  # of what operators give, which counts in the memos too
        with place:
            try:
                found.append(make())
            except (RuntimeError, AssertionError, UnsupportedFakeTensorException) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1]


# --- in and out ---------------------------------------------------------------------------------


def attributes() -> dict[tuple[str, str], Any]:
    """What every module but ours and this one has, by module and name."""
    return {
        (name, attribute): value
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and not name.startswith(("torch_fakeify", "test_"))
        for attribute, value in list(vars(module).items())
    }


def test_uninstall_restores_every_attribute() -> None:
    """After uninstall every attribute of every module is what it was, and so are torch's sets."""
    uninteresting_files()  # it imports modules
    before = attributes()
    files, folders = set(uninteresting_files()), list(trace_rules.SKIP_DIRS)
    dropin.install()
    assert attributes().keys() == before.keys()
    changed = {key for key, value in attributes().items() if before[key] is not value}
    assert ("torch._subclasses.fake_tensor", "MetaConverter") in changed
    dropin.uninstall()
    after = attributes()
    # Others keep state in attributes of their own.
    different = {
        key for key in before if key[0].startswith("torch") and after[key] is not before[key]
    }
    skip = ("torch._dynamo.trace_rules", "SKIP_DIRS_RE")
    assert different <= {skip}
    assert after[skip] == before[skip]
    assert (uninteresting_files(), trace_rules.SKIP_DIRS) == (files, folders)


def test_what_is_replaced() -> None:
    """By module: what `install` reaches, which `replaced` lists before and after it."""
    expected = [
        ("torch._subclasses.fake_tensor", "MetaConverter"),
        *(("torch._subclasses.meta_utils", name) for name in NAMES),
        ("torch.fx._graph_pickler", "MetaConverter"),
        ("torch.fx._graph_pickler", "MetaTensorDesc"),
        ("torch.fx._graph_pickler", "MetaTensorDescriber"),
    ]
    for _ in range(2):
        listed = dropin.replaced()
        assert [
            (r.module, r.attribute) for r in listed if r.module.startswith("torch.")
        ] == expected
        assert all(r.file == sys.modules[r.module].__file__ for r in listed)
        dropin.install()
    for module in (meta_utils, fake_tensor, _graph_pickler):
        for name in NAMES:
            assert getattr(module, name, OURS[name]) is OURS[name]


def test_modules_imported_meanwhile_are_restored() -> None:
    """A module that takes a class by name while the drop-in is there has torch's afterwards."""
    holder = types.ModuleType("holder_of_a_converter")
    sys.modules[holder.__name__] = holder
    try:
        with dropin.installed():
            holder.Mine = meta_utils.MetaConverter
            assert holder.Mine is OURS["MetaConverter"]
        assert holder.Mine is TORCHS["MetaConverter"]
    finally:
        del sys.modules[holder.__name__]


def test_twice_is_once() -> None:
    """Installing twice and uninstalling twice do no more than once; blocks nest."""
    dropin.uninstall()
    folders = list(trace_rules.SKIP_DIRS)
    dropin.install()
    dropin.install()
    assert len(trace_rules.SKIP_DIRS) == len(folders) + 1
    with dropin.installed():
        with dropin.installed():
            pass
        assert dropin.is_installed()
    assert dropin.is_installed()  # what it was before the block
    dropin.uninstall()
    dropin.uninstall()
    assert folders == trace_rules.SKIP_DIRS
    with pytest.raises(KeyError), dropin.installed():
        raise KeyError
    assert not dropin.is_installed()


def test_modes_keep_their_converter() -> None:
    """A mode has for good the converter that was in place when it was made."""
    old = FakeTensorMode()
    with dropin.installed():
        new = FakeTensorMode()
        assert type(old.fake_tensor_converter.meta_converter) is TORCHS["MetaConverter"]
    for mode, classes in ((old, TORCHS), (new, OURS)):
        converter = mode.fake_tensor_converter.meta_converter
        assert type(converter) is classes["MetaConverter"]
        assert type(converter.describer) is classes["MetaTensorDescriber"]
        assert type(mode.from_tensor(torch.empty(2))) is FakeTensor


def test_environment_variable_installs() -> None:
    """With ``TORCH_FAKEIFY_DROPIN=1``, importing the package is enough."""
    code = (
        "import torch_fakeify as tfk\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "print(type(FakeTensorMode().fake_tensor_converter.meta_converter).__module__)\n"
        "tfk.dropin.uninstall()\n"
        "print(type(FakeTensorMode().fake_tensor_converter.meta_converter).__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"TORCH_FAKEIFY_DROPIN": "1"},
    )
    assert done.stdout.split() == ["torch_fakeify.dropin_convert", "torch._subclasses.meta_utils"]


def test_stacks_do_not_point_here() -> None:
    """A guard's place is the user's, and Dynamo traces none of our files."""

    def place() -> str:
        env = ShapeEnv()
        FakeTensorMode(shape_env=env).from_tensor(torch.empty(5))
        (reason,) = env.var_to_range_sloc.values()
        return str(reason.upper.framework_loc)

    ours, theirs = both(place)
    assert ours == theirs
    assert __file__ in ours
    with dropin.installed():
        assert {rebuild.__file__, dropin_convert.__file__} < uninteresting_files()
        assert trace_rules.check_file(rebuild.__file__).skipped
    assert not trace_rules.check_file(rebuild.__file__).skipped


# --- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs(name: str) -> None:
    """Each method that torch's class has, ours has with the same parameters and defaults."""
    ours, theirs = OURS[name], TORCHS[name]
    for attribute, value in vars(theirs).items():
        if not inspect.isroutine(value) or attribute in PRIVATE_STEPS:
            continue
        mine, torchs = getattr(ours, attribute), getattr(theirs, attribute)
        try:
            expected = inspect.signature(torchs).parameters.values()
        except ValueError:  # a method of C that every class has
            continue
        found = inspect.signature(mine).parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == [
            (p.name, p.kind, p.default) for p in expected
        ], attribute


@pytest.mark.parametrize("name", ["MetaTensorDesc", "MetaStorageDesc"])
def test_fields_are_torchs(name: str) -> None:
    """Descriptions have torch's fields with torch's defaults, in torch's order."""
    ours, theirs = (
        [(f.name, f.default) for f in dataclasses.fields(c[name])] for c in (OURS, TORCHS)
    )
    assert ours == theirs
    assert getattr(OURS[name], "_UNSERIALIZABLE", None) == getattr(
        TORCHS[name], "_UNSERIALIZABLE", None
    )


def test_attributes_are_torchs() -> None:
    """Converters and describers have torch's attributes; describers are numbered together."""
    for name in ("MetaConverter", "MetaTensorDescriber"):
        ours, theirs = OURS[name](copy_data=True), TORCHS[name](copy_data=True)
        assert vars(ours).keys() - {"_short"} == vars(theirs).keys()
        for attribute, value in vars(theirs).items():
            if attribute not in ("describer", "id"):
                assert type(vars(ours)[attribute]) is type(value)
    first = OURS["MetaTensorDescriber"]().id
    assert TORCHS["MetaTensorDescriber"]().id == first + 1
    assert OURS["MetaTensorDescriber"]().id == first + 2


# --- descriptions and events --------------------------------------------------------------------


def a_leaf_with_grad() -> torch.Tensor:
    """A leaf with a gradient that is a view."""
    t = torch.empty(3, 4, requires_grad=True)
    t.grad = torch.empty(4, 3).t()
    return t


def marked() -> torch.Tensor:
    """A tensor with a dynamic dim and a hint for it."""
    t = torch.empty(6, 4)
    torch._dynamo.mark_dynamic(t, 0, hint_override=8)
    return t


def jagged(*, view: bool = False) -> torch.Tensor:
    """A jagged nested tensor, or one that is a view of its values."""
    values, offsets = torch.randn(5, 3), torch.tensor([0, 2, 5])
    if view:
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=3)
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(3, 3)], layout=torch.jagged)


def functional(t: torch.Tensor) -> torch.Tensor:
    """A functional tensor that functorch did not make."""
    return torch._to_functional_tensor(t)


def two(*size: int, **kwargs: Any) -> TwoTensor:
    """A wrapper subclass."""
    return TwoTensor(torch.randn(size), torch.randn(size), **kwargs)


def in_inference(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor as made in inference mode."""
    with torch.inference_mode():
        return make()


def without_grad(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor as made without grad."""
    with torch.no_grad():
        return make()


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.empty(2, 3),
    "strides": lambda: torch.empty_strided((2, 3), (1, 4)),
    "scalar": lambda: torch.tensor(3),
    "parameter": lambda: torch.nn.Parameter(torch.empty(2, 3)),
    "buffer": lambda: torch.nn.Buffer(torch.empty(2, 3), persistent=False),
    "grad": a_leaf_with_grad,
    "history": lambda: torch.empty(3, requires_grad=True).clone(),
    "marks": marked,
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "conj": lambda: torch.empty(3, dtype=torch.complex64).conj(),
    "imag": lambda: torch.empty(3, dtype=torch.complex64).conj().imag,
    "bytes": lambda: torch.empty(4, 3).view(torch.uint8),
    "view": lambda: torch.empty(4, 3).t()[1:],
    "leaf view": lambda: without_grad(lambda: torch.empty(4, 3)[1:]).requires_grad_(),
    "two steps": lambda: torch.empty(4).view(2, 2).requires_grad_().view(4),
    "offset": lambda: torch.empty(8)[2:].detach(),
    "multi": lambda: torch.empty(4, requires_grad=True).unbind()[0],
    "no bytes": lambda: (t := torch.empty(4), t.untyped_storage().resize_(0))[0],
    "inference": lambda: in_inference(lambda: torch.empty(2, 3)),
    "inference view": lambda: in_inference(lambda: torch.empty(2, 3)[1:]),
    "coo": lambda: torch.eye(3).to_sparse(),
    "hybrid": lambda: torch.randn(3, 4, 2).to_sparse(1).requires_grad_(),
    "coo history": lambda: torch.eye(3).to_sparse().requires_grad_().clone(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc().requires_grad_(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "mkldnn": lambda: torch.randn(2, 3).to_mkldnn(),
    "wrapper": lambda: two(3, 4),
    "wrapper parameter": lambda: torch.nn.Parameter(two(3, 4)),
    "wrapper grad": lambda: two(3, 4, requires_grad=True).clone(),
    "wrapper view": lambda: two(3, 4)[1:],
    "wrapper transposed": lambda: two(3, 4, requires_grad=True).t(),
    "wrappers": lambda: TwoTensor(two(3, 4), two(3, 4)),
    "wrapper of views": lambda: TwoTensor(torch.randn(4, 3).t(), torch.randn(4, 3).t()),
    "jagged": jagged,
    "jagged view": lambda: jagged(view=True),
    "jagged values": lambda: jagged().values(),
    "offsets": lambda: jagged().offsets(),
    "functional": lambda: functional(torch.randn(3, 4, requires_grad=True)),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "view of coo": lambda: torch.eye(3).to_sparse().requires_grad_().t(),
}


class Events(logging.Handler):
    """Collects what torch's structured trace is told."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: Any) -> None:
        """Keeps what was said, without the describer's number and the time."""
        said = {
            key: {k: v for k, v in value.items() if k != "describer_id"}
            for key, value in record.metadata.items()
            if key.startswith("describe_")
        }
        if said:
            self.found.append(said)


def traced(function: Callable[[], Any]) -> list[Any]:
    """The events that are written while the function runs."""
    logger = logging.getLogger("torch.__trace")
    handler = Events()
    logger.addHandler(handler)
    try:
        function()
    finally:
        logger.removeHandler(handler)
    return handler.found


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_torchs(kind: str) -> None:
    """The trace events of a tensor are torch's: the same fields in the same order, and once."""
    t = KINDS[kind]()

    def events() -> list[Any]:
        describer = meta_utils.MetaTensorDescriber()
        found = traced(lambda: describer.describe_tensor(t, trace=True))
        again = traced(lambda: describer.describe_tensor(t, trace=True))
        if not meta_utils.is_sparse_compressed(t):  # its components are other tensors each time
            assert again == []
            assert describer.traced_tensors == set(describer.lookup_tensor.values())
        return [list(event.items()) for event in found]

    ours, theirs = both(events)
    # Functional tensors have another inside each time they are asked.
    ours, theirs = ([re.sub("0x[0-9a-f]+", "#", str(e)) for e in found] for found in (ours, theirs))
    assert ours == theirs
    assert len(ours) >= 1


def test_source_event() -> None:
    """A tensor with a source is said to be it, unless the caller has said so before."""
    t = torch.empty(3)

    def events() -> list[Any]:
        mode = FakeTensorMode()
        return traced(lambda: mode.from_tensor(t, source=LocalSource("x"))) + traced(
            lambda: mode.from_tensor(torch.empty(2), source=LocalSource("y"), trace=False)
        )

    ours, theirs = both(events)
    assert ours == theirs
    assert ours[-1] == {"describe_source": {"id": 0, "source": "L['x']"}}


def test_descriptions_are_dataclasses() -> None:
    """``replace``, ``shape``, equality and JSON work as on torch's."""
    d = OURS["MetaTensorDescriber"]().describe_tensor(torch.empty(3, 4)[1:])
    other = dataclasses.replace(d, fake_mode=None, ndim=7)
    assert (other.ndim, other.base, other.is_view, other.shape) == (7, d.base, True, (2, 4))
    assert dataclasses.replace(d) == d
    assert other != d
    assert d.as_json(5)["describer_id"] == 5
    assert d.base.storage is not d.storage
    assert d.base.storage == d.storage
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.ndim = 3


# --- conversion ---------------------------------------------------------------------------------


def told(t: Any) -> Any:
    """What a tensor of any kind says of itself, and what is inside it."""
    if not isinstance(t, torch.Tensor):
        return str(t)
    wrapper = hasattr(t, "__tensor_flatten__")
    strided = t.layout in (torch.strided, torch.jagged)
    found: dict[str, Any] = {
        "type": type(t),
        "text": re.sub(r"\bj\d+", "j", f"{t.dtype} {tuple(t.shape)} {t.layout} {t.device}"),
        "flags": (t.requires_grad, t.is_leaf, t.is_inference(), isinstance(t, torch.nn.Parameter)),
        "grad_fn": None if t.grad_fn is None else t.grad_fn.name(),
        "keys": str(torch._C._dispatch_keys(t)),
        "extra": {k: getattr(t, k, None) for k in ("_is_buffer", "persistent", "fake_device")},
        "nested int": str(getattr(t, "nested_int_memo", None)),
    }
    if strided:
        place = f"{t.stride()} {t.storage_offset()} {t.untyped_storage().nbytes()}"
        found["place"] = re.sub(r"\bj\d+", "j", place), t.is_conj(), t.is_neg()
    if t.layout is torch.sparse_coo:
        found["sparse"] = t.sparse_dim(), t.dense_dim(), t.is_coalesced()
    if t._is_view():
        found["base"] = torch._C._autograd._get_creation_meta(t), told(t._base)
    grad = meta_utils.safe_grad(t)
    if grad is not None:
        found["grad"] = told(grad)
    if wrapper:
        found["inner"] = [told(getattr(t, name)) for name in t.__tensor_flatten__()[0]]
    return found


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_equal_torchs(kind: str, symbolic: bool) -> None:
    """A tensor of each kind becomes what torch makes of it, or the same exception."""
    t = KINDS[kind]()
    envs: list[ShapeEnv] = []

    def make() -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        envs.append(mode.shape_env)
        fake = mode.from_tensor(t)
        converter = mode.fake_tensor_converter.meta_converter
        counts = converter.hit, converter.miss, converter.arg_cnt, converter.successful()
        assert mode.from_tensor(t) is fake
        return told(fake), counts, len(converter.tensor_memo), len(converter.storage_memo)

    ours, theirs = both(make)
    assert ours == theirs
    if symbolic:
        envs[0].check_equal(envs[1])


def dynamic(t: Any, source: Any) -> Any:
    """The policy by which every dim of a tensor, of its base and of its inner tensors is dynamic."""
    base = dynamic(t._base, AttrSource(source, "_base")) if t._is_view() else None
    dims = [DimDynamic.DYNAMIC] * t.dim()
    if not is_traceable_wrapper_subclass(t):
        return StatelessSymbolicContext(dynamic_sizes=dims, view_base_context=base)
    parts = {name: getattr(t, name) for name in t.__tensor_flatten__()[0]}
    return SubclassSymbolicContext(
        dynamic_sizes=dims,
        constraint_sizes=[None] * t.dim(),
        view_base_context=base,
        tensor_source=source,
        inner_contexts={name: dynamic(p, AttrSource(source, name)) for name, p in parts.items()},
    )


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"nested"}))  # it has no sizes
def test_dynamic_kinds_equal_torchs(kind: str) -> None:
    """With every dim dynamic a tensor of each kind has torch's symbols, at all depths."""
    t, source = KINDS[kind](), LocalSource("x")
    policy = dynamic(t, source)
    envs: list[Any] = []

    def make() -> Any:
        envs.append(ShapeEnv())
        fake = FakeTensorMode(shape_env=envs[-1]).from_tensor(
            t, source=source, symbolic_context=policy
        )
        return told(fake)

    ours, theirs = both(make)
    assert ours == theirs
    envs[0].check_equal(envs[1])
    assert [str(g.expr) for g in envs[0].guards] == [str(g.expr) for g in envs[1].guards]


class Below(TorchDispatchMode):
    """Does some work where operators are dispatched to Python, below autograd."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does the work once, and what was asked for."""
        if not self.found:
            self.found.append(self.work())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", ["no_grad", "inference", "below autograd"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_active_says_nothing(kind: str, place: str) -> None:
    """The modes around a conversion change its result no more than they change torch's."""
    t = KINDS[kind]()

    def work() -> Any:
        return told(FakeTensorMode(shape_env=ShapeEnv()).from_tensor(t))

    def make() -> Any:
        if place == "below autograd":
            with Below(work) as below:
                torch.ones(2, requires_grad=True).sin()
            return below.found
        with torch.no_grad() if place == "no_grad" else torch.inference_mode():
            return work()

    ours, theirs = both(make)
    assert ours == theirs


@settings(max_examples=40)
@given(st.data(), tensor_groups(marks=True), st.booleans())
def test_groups_equal_torchs(data: Any, group: list[torch.Tensor], static: bool) -> None:
    """Tensors that share storages and bases, under any policy: equal fakes, equal ShapeEnvs."""
    sources = [LocalSource(f"x{i}") for i in range(len(group))]
    policies = [data.draw(contexts(t, source)) for t, source in zip(group, sources, strict=True)]
    named = data.draw(st.booleans())

    def make() -> Any:
        mode = FakeTensorMode(shape_env=None if static else ShapeEnv())
        fakes = [
            mode.from_tensor(
                t, source=source if named else None, symbolic_context=None if static else policy
            )
            for t, source, policy in zip(group, sources, policies, strict=True)
        ]
        return mode, fakes

    ours, theirs = both(make)
    if isinstance(ours, str) or isinstance(theirs, str):
        assert ours == theirs
        return
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert_same(a, b)
        assert str(a.untyped_storage().nbytes()) == str(b.untyped_storage().nbytes())
    assert relations(ours[1]) == relations(theirs[1])
    if not static:
        ours[0].shape_env.check_equal(theirs[0].shape_env)
    assert [in_place(t) for t in ours[1]] == [in_place(t) for t in theirs[1]]


def test_fakes_of_other_modes() -> None:
    """Fake tensors of this ShapeEnv, of another, and of none: reused, carried over, kept."""
    x = torch.empty(6, 4)

    def make() -> Any:
        here, there = ShapeEnv(), ShapeEnv()
        mode = FakeTensorMode(shape_env=here)
        t = FakeTensorMode(shape_env=there).from_tensor(x, source=LocalSource("x"))
        twin = FakeTensorMode(shape_env=here).from_tensor(x, source=LocalSource("y"))
        static, again = (FakeTensorMode().from_tensor(x) for _ in range(2))
        policy = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        fakes = [(t, None), (t[1:], None), (twin, None), (static, None), (again, policy)]
        made = [
            mode.fake_tensor_converter.meta_converter(
                fake,
                here,
                callback=lambda m, device: FakeTensor(mode, m(), device),
                source=LocalSource(f"a{i}"),
                symbolic_context=context,
            )
            for i, (fake, context) in enumerate(fakes)
        ]
        return [str((m.shape, m.stride(), m.storage_offset())) for m in made], here

    ours, theirs = both(make)
    assert ours[0] == theirs[0]
    assert "s" not in ours[0][3]
    assert "s" in ours[0][4]
    ours[1].check_equal(theirs[1])


def layers(t: torch.Tensor) -> list[Any]:
    """The wrappers of functorch around a tensor, and what is inside."""
    c = torch._C._functorch
    if not c.is_functorch_wrapped_tensor(t):
        return [told(t)]
    bdim = c.maybe_get_bdim(t)
    grad = t.requires_grad, t.is_leaf
    found = [c.is_batchedtensor(t), c.maybe_get_level(t), bdim, t.shape, grad]
    return [found, *layers(c.get_unwrapped(t))]


def test_functorch() -> None:
    """Batched and grad-tracking tensors become wrapped fakes of the same levels."""

    def make() -> Any:
        found: list[Any] = []
        mode = FakeTensorMode()

        def seen(t: torch.Tensor) -> torch.Tensor:
            try:
                found.append(layers(mode.from_tensor(t)))
            except AssertionError as error:
                found.append(str(error))
            return t.sum()

        torch.vmap(seen, in_dims=1)(torch.randn(3, 4))
        torch.func.grad(seen)(torch.randn(3))
        torch.vmap(torch.func.grad(seen))(torch.randn(3, 4))
        torch.func.functionalize(seen)(torch.randn(3))
        torch.func.grad(torch.func.grad(seen))(torch.tensor(1.0))
        torch.func.grad(torch.func.grad(lambda t: seen(t.sin())))(torch.tensor(1.0))
        torch.func.grad(lambda t: seen(t.sin()))(torch.randn(3))
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            torch.func.grad(lambda t: mode.from_tensor(t[1:]).sum())(torch.randn(4))
        return [*found, str(caught.value).partition("\n")[0]]

    ours, theirs = both(make)
    assert ours == theirs
    assert ours[-1] == "attempted to apply meta conversion to view functorch tensor"
    assert [len(found) for found in ours[:5]] == [2, 2, 3, 2, 3]
    assert ours[-2] == "False != True"  # torch makes no non-leaf of it, and says so


def test_copy_data() -> None:
    """With ``copy_data`` fakes have real tensors with the same data, on shared real storages."""
    x = torch.arange(6.0)
    group = [
        x,
        x.view(2, 3),
        x[2:].detach(),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
    ]

    def make() -> Any:
        mode = FakeTensorMode()
        mode.fake_tensor_converter = fake_tensor.FakeTensorConverter(copy_data=True)
        fakes = [mode.from_tensor(t) for t in group]
        real = [fake.real_tensor for fake in fakes]
        storages = [t.untyped_storage() for t in real[:3] if t is not None]
        assert all(s.data_ptr() != x.untyped_storage().data_ptr() for s in storages)
        own = [getattr(f.untyped_storage(), "real_storage", None) is not None for f in fakes[:3]]
        first = [a.data_ptr() == storages[0].data_ptr() for a in storages]
        return str(real), own, first, [told(f) for f in fakes]

    ours, theirs = both(make)
    assert ours == theirs
    assert "0., 1., 2." in ours[0]
    with dropin.installed():
        mode = FakeTensorMode()
        mode.fake_tensor_converter = fake_tensor.FakeTensorConverter(copy_data=True)
        made = mode.from_tensor(torch.nn.Parameter(torch.ones(3)))
    assert made.real_tensor.tolist() == [1.0, 1.0, 1.0]  # torch leaves it uninitialized


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"no bytes"}))  # torch crashes at that
def test_real_tensors_equal_torchs(kind: str) -> None:
    """With real tensors propagated, fakes of each kind have the real tensors that torch gives them."""
    t = KINDS[kind]()

    def make() -> Any:
        with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
            mode = FakeTensorMode(shape_env=ShapeEnv())
        fake: Any = mode.from_tensor(t, source=LocalSource("x"))
        real = getattr(fake, "real_tensor", None)
        if real is None or real.layout is not torch.strided:
            return told(fake), None if real is None else (real.shape, real.layout)
        storage = fake.untyped_storage().real_storage.data_ptr()
        place = real.stride(), real.storage_offset(), real.untyped_storage().data_ptr() == storage
        return told(fake), real.shape, place

    ours, theirs = both(make)
    assert ours == theirs


def test_real_tensor_of_a_freed_storage() -> None:
    """Data that was freed is not copied; torch reads it and crashes."""
    with dropin.installed(), torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        fake: Any = FakeTensorMode().from_tensor(KINDS["no bytes"]())
    assert fake.real_tensor.shape == (4,)


def test_without_a_mode() -> None:
    """A converter of its own makes meta tensors; what is no tensor it gives back or refuses."""

    class Like:
        def __torch_function__(self, *args: Any, **kwargs: Any) -> Any: ...

    def make() -> Any:
        converter = meta_utils.MetaConverter()
        x = torch.empty(4, 3, requires_grad=True)
        made = [converter(x), converter(x[1:]), converter(x), converter(3), converter(Like())]
        assert converter.get_tensor_memo(converter.describer.describe_tensor(x)) is made[0]
        assert made[1]._base is made[0]
        return [told(m) for m in made], converter.hit, converter.miss, converter.arg_cnt

    ours, theirs = both(make)
    assert ours == theirs
    assert ours[0][3:] == ["3", "NotImplemented"]


def test_dispatch_must_be_on() -> None:
    """Where dispatch to Python is off, conversion says so instead of crashing."""

    def make() -> Any:
        with torch.utils._mode_utils.no_dispatch():
            meta_utils.MetaConverter()(torch.empty(2))

    ours, theirs = both(make)
    assert ours == theirs
    assert ours.startswith("AssertionError:  This indicates you set no_dispatch()")


def test_callback_must_detach() -> None:
    """A callback whose tensors have a history is refused."""
    x = torch.empty(2, requires_grad=True)

    def make() -> Any:
        meta_utils.MetaConverter()(torch.empty(2), callback=lambda m, device: m() + x.to("meta"))

    ours, theirs = both(make)
    assert ours == theirs == "AssertionError: the callback you passed in doesn't detach"


# --- memos --------------------------------------------------------------------------------------


def test_memos_are_weak() -> None:
    """The converter keeps neither what it was given nor what it made; numbers stay with tensors."""

    def make() -> Any:
        converter = FakeTensorMode().fake_tensor_converter.meta_converter
        mode_callback = converter._identity_callable
        x, y = torch.empty(3), torch.empty(4)
        fakes = [converter(x, callback=mode_callback), converter(y, callback=mode_callback)]
        storage = weakref.ref(fakes[1].untyped_storage())
        describer = converter.describer
        counts = [len(converter.tensor_memo), len(converter.storage_memo)]
        ids = [describer.get_tensor_id(x), describer.get_tensor_id(y)]
        assert x in describer.lookup_tensor
        assert x.untyped_storage() in describer.lookup_storage
        del fakes[1]
        gc.collect()
        counts += [len(converter.tensor_memo), len(converter.storage_memo), storage() is None]
        del y
        gc.collect()
        counts += [len(describer.lookup_tensor), len(describer.lookup_storage)]
        describer.lookup_tensor.clear()
        assert describer.get_tensor_id(x) == 2
        assert converter(x) is not fakes[0]
        return counts, ids, describer.next_tensor_id, describer.next_storage_id

    ours, theirs = both(make)
    assert ours == theirs


@pytest.mark.parametrize("symbolic", [False, True])
def test_modes_die_at_once(symbolic: bool) -> None:
    """A mode without fake tensors is freed by its last reference: nothing goes around in a circle."""

    def make() -> bool:
        mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        made = [mode.from_tensor(t) for t in (torch.empty(3, 4), torch.nn.Parameter(torch.ones(2)))]
        gone = weakref.ref(mode)
        gc.disable()
        try:
            del made, mode
            return gone() is None
        finally:
            gc.enable()

    ours, theirs = both(make)
    assert ours == theirs


def test_short_ways_are_taken() -> None:
    """Plain tensors of torch's own callback go the short ways, by which the tests above hold too."""
    with dropin.installed():
        mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.from_tensor(torch.empty(3, 4))
    short = mode.fake_tensor_converter.meta_converter._short
    assert list(short._templates) == [torch.device("cpu")]
    assert short._sizes._range is not None


def test_debug_traces_are_kept() -> None:
    """With torch's switch for debugging on, fakes say where they were made."""

    def make() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_tensor.FakeTensorConfig, "debug", True)
            return hasattr(FakeTensorMode().from_tensor(torch.empty(3)), "_debug_trace")

    assert both(make) == (True, True)


def test_meta_device_is_asked_of_the_mode() -> None:
    """Whether a mode takes tensors on the device ``meta`` is the mode's to say."""

    def make() -> Any:
        mode = FakeTensorMode()
        mode.allow_meta = True
        assert mode.from_tensor(torch.empty(3, device="meta")).device.type == "meta"
        mode.allow_meta = False
        mode.from_tensor(torch.empty(3, device="meta"))

    ours, theirs = both(make)
    assert (
        ours
        == theirs
        == ("AssertionError: device.type must not be 'meta' when allow_meta is False")
    )


def test_memos_can_be_set() -> None:
    """What is put into the memos stands for the tensor and the storage."""
    converter = OURS["MetaConverter"]()
    x, mine = torch.empty(3), torch.empty(3, device="meta")
    d = converter.describer.describe_tensor(x)
    assert converter.get_tensor_memo(d) is converter.get_storage_memo(d.storage) is None
    converter.set_storage_memo(d.storage, mine.untyped_storage())
    made = converter(x)
    assert made.untyped_storage() is mine.untyped_storage()
    converter.set_tensor_memo(d, mine)
    assert converter(x) is mine
    assert converter.meta_storage(d.storage, lambda m: m()) is mine.untyped_storage()


# --- what is built upon them --------------------------------------------------------------------


def test_graph_pickler() -> None:
    """GraphPickler writes and reads fake tensors, static and symbolic, and views of one another."""

    def make() -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.empty(6, 4), source=LocalSource("x"))
        data = _graph_pickler.GraphPickler.dumps([x, x, mode.from_tensor(torch.empty(3, 1).cos())])
        other = FakeTensorMode(shape_env=ShapeEnv())
        loaded = _graph_pickler.GraphPickler.loads(data, other)
        assert loaded[0] is loaded[1]
        assert loaded[0].fake_mode is other
        return [told(t) for t in loaded]

    ours, theirs = both(make)
    assert ours == theirs


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "kind", ["view", "grad", "conj", "imag", "csr", "bsc", "two steps", "multi"]
)
def test_graph_pickler_with_parts(kind: str, symbolic: bool) -> None:
    """Under the drop-in GraphPickler takes fakes with parts that are fakes, as not every torch does."""

    def mode() -> FakeTensorMode:
        return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)

    pickler = _graph_pickler.GraphPickler
    with dropin.installed():
        here, there = mode(), mode()
        fake = here.from_tensor(KINDS[kind](), source=LocalSource("x"))
        data = pickler.dumps([here.shape_env, fake])
        loaded: Any = pickler.loads(data, there)[1]
    assert told(loaded) == told(fake)
    parts = [loaded, loaded._base, loaded.grad if loaded.is_leaf else None]
    assert {part.fake_mode for part in parts if part is not None} == {there}
    if symbolic and kind == "view":
        assert loaded.shape[0].node.shape_env is there.shape_env
    here, there = mode(), mode()
    plain = here.from_tensor(KINDS[kind](), source=LocalSource("x"))
    try:
        data = pickler.dumps([here.shape_env, plain])
    except AttributeError:  # as of torch 2.13: the parts cannot be pickled
        return
    theirs: Any = pickler.loads(data, there)[1]
    assert told(theirs) == told(loaded)


def test_compiling_gives_the_same_guards() -> None:
    """Dynamo and AOTAutograd under the drop-in trace the same graph under the same guards."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.t()[1:] @ y if x.shape[0] > 3 else x

    def make() -> Any:
        torch._dynamo.reset()
        seen: list[str] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            mode = torch._guards.detect_fake_mode(inputs)
            converter = mode.fake_tensor_converter.meta_converter
            seen.append(str(dropin.is_installed() == isinstance(converter, OURS["MetaConverter"])))
            seen.append(gm.print_readable(print_output=False))
            seen.extend(f"{g.expr} {g.sloc}" for g in mode.shape_env.guards)
            return gm.forward

        x = torch.randn(6, 5, requires_grad=True)
        torch.compile(f, backend=backend, dynamic=True)(x, x[:, 1:].detach())
        return seen

    ours, theirs = both(make)
    assert ours == theirs
    assert ours[0] == "True"


def test_contexts_must_fit() -> None:
    """A symbolic context of the wrong class is refused as torch refuses it."""
    stateless = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)

    def make() -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        mode.from_tensor(two(3, 4), source=LocalSource("x"), symbolic_context=stateless)

    ours, theirs = both(make)
    assert ours == theirs
    assert ours.startswith("AssertionError: Expected SubclassSymbolicContext or None")
