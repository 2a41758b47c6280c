"""Helpers of the tests of dropin."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from torch_fakeify import dropin
from torch_fakeify.dropin import converter as dropin_convert
from torch_fakeify.dropin import desc
from torch_fakeify.dropin import describer as dropin_describe

if TYPE_CHECKING:
    from collections.abc import Callable


OURS = {
    "MetaConverter": dropin_convert.MetaConverter,
    "MetaStorageDesc": desc.MetaStorageDesc,
    "MetaTensorDesc": desc.MetaTensorDesc,
    "MetaTensorDescriber": dropin_describe.MetaTensorDescriber,
}


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
