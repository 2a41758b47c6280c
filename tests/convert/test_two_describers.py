"""Records of two describers never become one tensor, whichever way they reach a process."""

from __future__ import annotations

import copy
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import fresh, piped
from torch._subclasses import FakeTensorMode

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITER = """
import pickle, sys, torch, torch_fakeify as tfk
record = tfk.describe_tensor(torch.empty(4))
pickle.dump([tfk.dumps(record), pickle.dumps(record)], sys.stdout.buffer)
"""
_unpickle: Callable[[bytes], Any] = pickle.loads


@pytest.fixture(scope="module")
def documents_and_pickles() -> list[list[bytes]]:
    """What two fresh processes write of the record of their first tensor."""
    return [_unpickle(piped(_WRITER)) for _ in range(2)]


def _convert(*records: tfk.MetaTensorDesc) -> list[torch.Tensor]:
    converter = tfk.MetaConverter(FakeTensorMode())
    return [converter.from_desc(record) for record in records]


@pytest.mark.sweep
@pytest.mark.parametrize("read", [tfk.loads, _unpickle], ids=["documents", "pickles"])
def test_equal_records_of_two_processes_are_refused_together(
    read: Callable[[bytes], Any], documents_and_pickles: list[list[bytes]]
) -> None:
    """Both processes number their tensor 0: nothing else tells their records apart."""
    first, second = (read(data[read is _unpickle]) for data in documents_and_pickles)
    assert first == second
    for records in ((first, second), (first, tfk.describe_tensor(torch.empty(4)))):
        with pytest.raises(tfk.ConvertError, match=r"two (describers|documents)"):
            _convert(*records)
        with pytest.raises(tfk.UnsupportedValueError, match=r"two (describers|documents)"):
            tfk.dumps(list(records))
    assert _convert(first)[0].shape == _convert(second)[0].shape == (4,)


@pytest.mark.sweep
def test_documents_of_two_processes_have_equal_bytes(
    documents_and_pickles: list[list[bytes]],
) -> None:
    """What tells describers apart is not in a document, whose bytes depend on the records alone."""
    (document, _), (other, _) = documents_and_pickles
    assert document == other


def test_documents_of_one_named_describer_meet() -> None:
    """Records that one describer wrote into two documents are of its tensors in both."""
    describer, base = tfk.MetaTensorDescriber(), torch.empty(8)
    parts = [base[:4], base[4:], base[:4]]
    views = [describer.describe_tensor(part) for part in parts]
    first, second, again = (tfk.loads(tfk.dumps(d), describer="worker 1") for d in views)
    head, tail, _ = fakes = _convert(first, second, again)
    assert head.untyped_storage()._cdata == tail.untyped_storage()._cdata
    assert [fake.storage_offset() for fake in fakes] == [0, 4, 0]
    assert tfk.loads(tfk.dumps([first, second, again])) == [first, second, again]
    other = tfk.loads(tfk.dumps(views[1]), describer="worker 2")
    with pytest.raises(tfk.ConvertError) as error:
        _convert(first, other)
    assert "of describer 'worker 1'" in str(error.value)
    assert "of describer 'worker 2'" in str(error.value)


def test_the_error_about_two_documents_says_how_to_join_them() -> None:
    """A reader who knows that one describer made both has one thing to write."""
    data = tfk.dumps(tfk.describe_tensor(torch.empty(4)))
    with pytest.raises(tfk.ConvertError, match=r"name it: `loads\(data, describer=\.\.\.\)`"):
        _convert(tfk.loads(data), tfk.loads(data))


def test_copies_and_pickles_are_of_the_describer_of_their_record() -> None:
    """They are equal to the record, give its fake tensor, and meet no record of another describer."""
    describer = tfk.MetaTensorDescriber()
    record = describer.describe_tensor(torch.empty(6)[1:4])
    pickled = pickle.dumps(record)
    copies = [
        copy.copy(record),
        copy.deepcopy(record),
        _unpickle(pickled),
        _unpickle(pickled),
    ]
    assert copies == [record] * len(copies)
    fake, *fakes = _convert(record, *copies)
    assert all(each is fake for each in fakes)
    for each in copies:
        assert each.base is not None
        for of_tensor in (each, each.base):
            with pytest.raises(tfk.ConvertError, match="two describers"):
                _convert(tfk.describe_tensor(torch.empty(4)), of_tensor)


def test_a_record_without_a_describer_hides_none() -> None:
    """A record that a caller made may come first: those of two describers are refused after it."""
    import msgspec

    describers = tfk.MetaTensorDescriber(), tfk.MetaTensorDescriber()
    first, second = (each.describe_tensor(torch.empty(4)) for each in describers)
    own = msgspec.structs.replace(first, id=70)
    with pytest.raises(tfk.ConvertError, match="two describers"):
        _convert(own, first, second)
    with pytest.raises(tfk.UnsupportedValueError, match="two describers"):
        tfk.dumps([own, first, second])


_FORKED = """
import os, pickle, torch, torch_fakeify as tfk
pickle.dumps(tfk.describe_tensor(torch.empty(1)))  # before the fork: child and parent inherit it
readable, writable = os.pipe()
if os.fork() == 0:
    os.write(writable, pickle.dumps(tfk.describe_tensor(torch.empty(4))))
    os._exit(0)
os.close(writable)
theirs = pickle.loads(os.fdopen(readable, "rb").read())
ours = tfk.describe_tensor(torch.empty(4))
assert ours == theirs
converter = tfk.MetaConverter(torch._subclasses.FakeTensorMode())
converter.from_desc(ours)
try:
    converter.from_desc(theirs)
except tfk.ConvertError as error:
    print(error.what)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.sweep
def test_a_forked_child_is_another_describer() -> None:
    """Parent and child go on with the same next id, for different tensors."""
    assert fresh("-c", _FORKED).stdout == "the records are of two describers\n"
