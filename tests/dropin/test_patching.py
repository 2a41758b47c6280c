"""Installing and uninstalling the drop-in; its signatures."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from typing import Any

import pytest
import torch
import torch._subclasses.meta_utils as meta_utils
from dropin_kinds import OURS, both
from processes import fresh
from torch._dynamo import trace_rules
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import _graph_pickler
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    uninteresting_files,
)

from torch_fakeify import dropin
from torch_fakeify.compat.torch_fakes import WHOLE_STORAGES
from torch_fakeify.convert import builder
from torch_fakeify.dropin import converter as dropin_convert

# torch's own describer asks for the gradient of non-leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


NAMES = ("MetaConverter", "MetaStorageDesc", "MetaTensorDesc", "MetaTensorDescriber")


PRIVATE_STEPS = {"_empty_create_subclass", "__class_getitem__", "__init_subclass__"}
"""Methods that nobody outside torch's class calls, and what the language gives a class."""


TORCHS = {name: getattr(meta_utils, name) for name in NAMES}


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


@pytest.mark.sweep
def test_environment_variable_installs() -> None:
    """With ``TORCH_FAKEIFY_DROPIN=1``, importing the package is enough."""
    code = (
        "import torch_fakeify as tfk\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "print(type(FakeTensorMode().fake_tensor_converter.meta_converter).__module__)\n"
        "tfk.dropin.uninstall()\n"
        "print(type(FakeTensorMode().fake_tensor_converter.meta_converter).__module__)\n"
    )
    done = fresh("-c", code, TORCH_FAKEIFY_DROPIN="1")
    assert done.stdout.split() == ["torch_fakeify.dropin.converter", "torch._subclasses.meta_utils"]


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
        assert {builder.__file__, dropin_convert.__file__} < uninteresting_files()
        assert trace_rules.check_file(builder.__file__).skipped
    assert not trace_rules.check_file(builder.__file__).skipped


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
        if (name, attribute) == ("MetaTensorDescriber", "describe_storage"):
            found = [p for p in found if p.name != "data" or WHOLE_STORAGES]  # torch 2.13 has none
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


@pytest.mark.parametrize("name", NAMES)
def test_classes_have_torchs_type_parameters(name: str) -> None:
    """Modules of torch that are imported later subscript them in annotations."""
    ours, theirs = (getattr(c[name], "__parameters__", ()) for c in (OURS, TORCHS))
    assert len(ours) == len(theirs)


def test_attributes_are_torchs() -> None:
    """Converters and describers have torch's attributes; describers are numbered together."""
    for name in ("MetaConverter", "MetaTensorDescriber"):
        ours, theirs = OURS[name](copy_data=True), TORCHS[name](copy_data=True)
        assert vars(ours).keys() - {"_sizes"} == vars(theirs).keys()
        for attribute, value in vars(theirs).items():
            if attribute not in ("describer", "id"):
                assert type(vars(ours)[attribute]) is type(value)
    first = OURS["MetaTensorDescriber"]().id
    assert TORCHS["MetaTensorDescriber"]().id == first + 1
    assert OURS["MetaTensorDescriber"]().id == first + 2
