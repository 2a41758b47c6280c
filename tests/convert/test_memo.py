"""The converter's cache of tensors and storages."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from converted_checks import dynamic_mode
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fakeify as tfk
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import MetaTensorDesc


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def test_equal_ids_give_the_same_fake_while_it_lives() -> None:
    """The memo is weak: a fake that died is made anew, on a new storage."""
    describer = MetaTensorDescriber()
    t = torch.empty(4)
    converter = MetaConverter(FakeTensorMode())
    fake = converter.from_desc(describer.describe_tensor(t))
    assert converter.from_desc(describer.describe_tensor(t)) is fake
    view = converter.from_desc(describer.describe_tensor(t[1:]))
    assert view._base is fake
    del fake, view
    gc.collect()
    assert not converter._tensors
    assert not converter._storages.entries
    assert converter.from_desc(describer.describe_tensor(t)).shape == (4,)


def loaded(d: MetaTensorDesc) -> MetaTensorDesc:
    """The record as another process has it, to which the reader says that one describer gave all."""
    return tfk.loads(tfk.dumps(d), describer="one")


def test_records_of_two_describers_are_not_mixed_up() -> None:
    """Two records with one id that cannot be one tensor are an error."""
    converter = MetaConverter(FakeTensorMode())
    fake = converter.from_desc(loaded(MetaTensorDescriber().describe_tensor(torch.empty(4))))
    with pytest.raises(tfk.ConvertError) as error:
        converter.from_desc(loaded(MetaTensorDescriber().describe_tensor(torch.empty(5))))
    assert fake is not None
    assert str(error.value) == (
        "tensor 0: two different records have the same id; expected float32 of size (4,) on cpu;"
        " found float32 of size (5,) on cpu. Convert the records of each describer with a"
        " converter of its own"
    )


def test_one_off_records_are_of_as_many_tensors() -> None:
    """Two calls give two ids, and their records go into one file and to one converter."""
    a, b = torch.empty(6), torch.empty(6)
    records = [tfk.describe_tensor(t) for t in (a[1:4], b[2:5])]
    for again in (records, tfk.loads(tfk.dumps(records))):
        converter = MetaConverter(FakeTensorMode())
        first, second = map(converter.from_desc, again)
        assert (first.storage_offset(), second.storage_offset()) == (1, 2)
        assert first.untyped_storage() is not second.untyped_storage()


def test_one_off_records_have_ids_of_their_own_in_every_thread() -> None:
    """No id of a tensor or storage is given twice, whoever describes at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(tfk.describe_tensor, [torch.empty(2) for _ in range(400)]))
    assert len({d.id for d in records}) == len({d.storage.id for d in records}) == 400


def test_one_off_records_of_jagged_tensors_share_no_size() -> None:
    """The ragged dims of two jagged tensors stay two."""
    parts = [torch.nested.nested_tensor_from_jagged(torch.ones(4), torch.tensor(offsets))
             for offsets in ([0, 1, 4], [0, 2, 4])]  # fmt: skip
    converter = MetaConverter(FakeTensorMode())
    first, second = (converter.from_desc(tfk.describe_tensor(t)) for t in parts)
    assert first.shape[1] != second.shape[1]


def test_one_off_records_share_the_symbols_of_one_shape_env() -> None:
    """A symbol of one environment is one symbol, and one of another environment another."""
    mode, other = dynamic_mode(), dynamic_mode()
    x = mode.from_tensor(torch.empty(3), source=LocalSource("x"))
    y = other.from_tensor(torch.empty(5), source=LocalSource("x"))
    with mode:
        z = x + 1
    converter = MetaConverter(dynamic_mode())
    sizes = [converter.from_desc(tfk.describe_tensor(t)).shape[0].node.expr for t in (x, z, y)]
    assert sizes[0] == sizes[1] != sizes[2]


def test_records_of_two_describers_are_told_apart_where_they_are_equal() -> None:
    """In one process what two describers give never meets in one converter, whatever it says."""
    converter = MetaConverter(FakeTensorMode())
    describers = MetaTensorDescriber(), MetaTensorDescriber()
    fake = converter.from_desc(describers[0].describe_tensor(torch.empty(4)))
    for t in (torch.empty(4), torch.empty(4)):  # of a known id, and of a new one
        with pytest.raises(tfk.ConvertError, match="the records are of two describers"):
            converter.from_desc(describers[1].describe_tensor(t))
    assert fake is not None


def _grad(t: torch.Tensor) -> torch.Tensor:
    t.grad = torch.empty(6)
    return t


OTHER: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "offset": (torch.empty(6)[1:4], torch.empty(6)[2:5], "storage_offset 1; found float32 of"),
    "stride": (torch.empty(2, 2), torch.empty(2, 2).t().contiguous().t(), "stride[0] 2"),
    "dtype": (torch.empty(3), torch.empty(3, dtype=torch.int32), "found int32"),
    "device": (torch.empty(3), torch.empty(3, device="meta"), "on meta"),
    "storage": (torch.empty(6).as_strided((3,), (1,)).detach(), torch.empty(3), "storage"),
    "requires grad": (torch.empty(3), torch.empty(3, requires_grad=True), "requires_grad True"),
    "parameter": (torch.empty(3, requires_grad=True), torch.nn.Parameter(torch.empty(3)),
                  "is_parameter True"),
    "base": (torch.empty(6, 2)[:, 0], torch.empty(12)[::2], "base.size"),
    "gradient": (torch.empty(6, requires_grad=True), _grad(torch.empty(6, requires_grad=True)),
                 "grad tensor 1"),
    "conjugate": (torch.empty(2, dtype=torch.complex64),
                  torch.empty(2, dtype=torch.complex64).conj(), "is_"),
}  # fmt: skip
"""Pairs of tensors that differ in one thing, and what the error says of it."""


@pytest.mark.parametrize("name", OTHER)
def test_a_known_id_with_another_content_is_an_error(name: str) -> None:
    """Whatever differs, between records that the reader takes for those of one describer; the error names both."""
    first, second, text = OTHER[name]
    converter = MetaConverter(FakeTensorMode())
    fake = converter.from_desc(loaded(MetaTensorDescriber().describe_tensor(first)))
    with pytest.raises(tfk.ConvertError) as error:
        converter.from_desc(loaded(MetaTensorDescriber().describe_tensor(second)))
    assert fake is not None
    assert text in str(error.value)
    assert "same id" in str(error.value)


def test_a_known_storage_of_another_size_or_device_is_an_error() -> None:
    """Two tensors of new ids are not put on one storage because its number is the same."""
    for other, text in (
        (torch.empty(7), "two different storages have the same id; expected 24 bytes"),
        (torch.empty(6, device="meta"), "tensors on two devices have the same storage"),
    ):
        describer = MetaTensorDescriber()
        first = describer.describe_tensor(torch.empty(6)[1:])
        second = msgspec.structs.replace(MetaTensorDescriber().describe_tensor(other), id=9)
        converter = MetaConverter(FakeTensorMode())
        fake = converter.from_desc(loaded(first))
        with pytest.raises(tfk.ConvertError) as error:
            converter.from_desc(second)
        assert fake is not None
        assert f"tensor 9, storage 0: {text}" in str(error.value)


def test_records_that_hold_one_another_twice_are_compared_in_no_time() -> None:
    """A tower of records of which each holds the one below twice has no end as a tree."""
    from torch_fakeify.records.id_owners import find_clash

    def tower(offset: int) -> MetaTensorDesc:
        plain = MetaTensorDescriber().describe_tensor(torch.empty(3))
        d = msgspec.structs.replace(plain, storage_offset=offset)
        for i in range(1, 80):
            d = msgspec.structs.replace(plain, id=i, base=d, grad=d, is_view=True)
        return d

    assert find_clash(tower(0), tower(0)) is None
    assert find_clash(tower(0), tower(1)) is not None


def test_a_base_that_was_given_another_storage_is_viewed_on_that_storage() -> None:
    """Its view is on the storage that the base has, not on the one it was made with."""
    describer = MetaTensorDescriber()
    t = torch.empty(4)
    mode = FakeTensorMode()
    converter = MetaConverter(mode)
    base = converter.from_desc(describer.describe_tensor(t))
    with mode, torch.no_grad():
        base.set_(torch.empty(8))
    view = converter.from_desc(describer.describe_tensor(t[1:]))
    assert view._base is base
    assert view.untyped_storage() is base.untyped_storage()
