"""Descriptions with live objects -> fake or meta tensors, behind torch's own signatures.

Method: ``MetaConverter`` of torch 2.13. The converter holds the state between calls; each call is a
`builder.DropinBuilder`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_fakes
from torch_fakeify.compat.torch_dispatch import no_dispatch
from torch_fakeify.convert.fake_tensors import neutral_dispatch_state
from torch_fakeify.convert.size_symbols import FreshSizes

from .builder import DropinBuilder, require, set_real_storage
from .describer import MetaTensorDescriber

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import ShapeEnv, SymbolicContext

    from .desc import MetaStorageDesc, MetaTensorDesc

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)

_EXCLUDED = (
    " This indicates you set no_dispatch() before calling into this"
    " function.  This is an error: we may be creating fake tensors and"
    " will perform operations on them which need fake tensor mode to"
    " be active.  You will segfault if you are in a no_dispatch() block."
)


class MetaConverter(Generic[_TensorT]):
    """Converts tensors that share storages and views into meta tensors or fakes that do.

    It holds weak references only.

    Args:
        copy_data: what is made holds a copy of the real tensor and storage
            (``real_tensor``, ``real_storage``).
    """

    def __init__(self, *, copy_data: bool = False) -> None:
        self.storage_memo: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self.tensor_memo: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.hit = 0
        self.miss = 0
        self.del_hook = None
        self.arg_cnt = 0
        self.copy_data = copy_data
        self.describer = MetaTensorDescriber(copy_data=copy_data)
        self._sizes: tuple[ShapeEnv, FreshSizes] | None = None

    def successful(self) -> bool:
        """Whether tensors were converted without a failure."""
        return self.hit > 0 and self.miss == 0

    def get_tensor_memo(self, t: MetaTensorDesc[Any]) -> torch.Tensor | None:
        """The live tensor of a description, or ``None``."""
        return self.tensor_memo.get(t.id, None)

    def set_tensor_memo(self, t: MetaTensorDesc[Any], v: _TensorT) -> None:
        """Cache the tensor of a description."""
        self.tensor_memo[t.id] = v

    def get_storage_memo(self, s: MetaStorageDesc) -> torch.UntypedStorage | None:
        """The live storage of a description, or ``None``."""
        return self.storage_memo.get(s.id, None)

    def set_storage_memo(self, s: MetaStorageDesc, v: torch.UntypedStorage) -> None:
        """Cache the storage of a description."""
        self.storage_memo[s.id] = v

    def meta_storage(
        self, s: MetaStorageDesc, callback: Callable[[Callable[[], torch.Tensor]], _TensorT]
    ) -> torch.UntypedStorage:
        """The storage of a description, made at its first use from a tensor of bytes."""
        cached = self.get_storage_memo(s)
        if cached is not None:
            return cached
        made = callback(
            lambda: torch.empty(s.size, dtype=torch.uint8, device="meta")
        ).untyped_storage()
        if self.copy_data:
            with torch.no_grad(), no_dispatch():
                data = require(s.data, "s.data")
                of_tensor = isinstance(data, torch.Tensor)
                real = torch_fakes.clone_real_storage(data) if of_tensor else data.clone()
                set_real_storage(made, real)
        self.set_storage_memo(s, made)
        return made

    def _fresh_sizes(self, shape_env: ShapeEnv) -> FreshSizes:
        """The maker of new symbols in an environment."""
        if self._sizes is None or self._sizes[0] is not shape_env:
            self._sizes = shape_env, FreshSizes(shape_env)
        return self._sizes[1]

    def _checked_get_tensor_memo(self, t: MetaTensorDesc[Any]) -> Any:
        cached = self.tensor_memo.get(t.id, None)
        if cached is None:
            raise AssertionError(f"Tensor memo for id {t.id} is None")
        return cached

    @classmethod
    def _checked_cast_tensor_t(cls, t: torch.Tensor) -> Any:
        return t

    @classmethod
    def _identity_callable(
        cls, t: Callable[[], torch.Tensor], device: torch.device | str | None = None
    ) -> Any:
        """The default callback, which returns the meta tensor itself."""
        del device
        return t()

    @classmethod
    def _backward_error(cls, t: _TensorT) -> _TensorT:
        """A non-leaf alias of the tensor; backward through it raises."""
        error = torch_dispatch.DelayedError(
            "Internal error: Tried to backward() through example input", 1
        )
        return error(t)

    def meta_tensor(
        self,
        t: MetaTensorDesc[Any],
        shape_env: ShapeEnv | None,
        callback_: Callable[..., _TensorT],
        source: Source | None,
        symbolic_context: SymbolicContext | None,
    ) -> _TensorT:
        """The tensor of a description; the same one as before if it is still alive.

        Args:
            t: the description.
            shape_env: of the symbols; ``None`` leaves sizes unchanged.
            callback_: makes a tensor on a device (``device=``) from a function that makes a meta
                tensor.
            source: of the tensor.
            symbolic_context: the policy for symbols of its sizes.

        Raises:
            AssertionError: dispatch to Python is off, or the description is invalid.
        """
        if torch_dispatch.python_dispatch_excluded():
            raise AssertionError(_EXCLUDED)
        return DropinBuilder(self, shape_env, callback_)._convert(t, source, symbolic_context)

    def __call__(
        self,
        t: torch.Tensor,
        shape_env: ShapeEnv | None = None,
        *,
        callback: Callable[..., _TensorT] | None = None,
        source: Source | None = None,
        symbolic_context: SymbolicContext | None = None,
        trace: bool = True,
    ) -> Any:
        """Describes and converts a tensor.

        Args:
            t: the tensor; other objects are returned unchanged.
            shape_env: see `meta_tensor`.
            callback: see `meta_tensor`; without one, bare meta tensors are made.
            source: see `meta_tensor`.
            symbolic_context: see `meta_tensor`.
            trace: whether to write the trace events, where there is a source.

        Returns:
            The tensor; ``NotImplemented`` for lazy and quantized tensors, for views of sparse
            tensors, and for tensor-like objects of other types.
        """
        if not isinstance(t, torch.Tensor):
            if not torch.overrides.is_tensor_like(t):
                return t
            self.miss += 1
            return NotImplemented
        base = t._base if t._is_view() else None
        if t.device.type == "lazy" or t.is_quantized or (base is not None and base.is_sparse):
            self.miss += 1
            return NotImplemented
        self.hit += 1
        trace = trace and source is not None
        # Before active modes are suspended: the description depends on them.
        d = self.describer.describe_tensor(t, trace=trace)
        if trace and source is not None:
            event = {"describer_id": self.describer.id, "id": d.id, "source": source.name}
            torch_dynamo.trace_structured("describe_source", metadata_fn=lambda: event)
        with neutral_dispatch_state(torch_dispatch.temporarily_clear_interpreter_stack):
            made: Any = self.meta_tensor(
                d, shape_env, callback or self._identity_callable, source, symbolic_context
            )
        if type(t) is torch.nn.Parameter:
            made._is_param = True  # the constructor would detach
        if getattr(t, "_is_buffer", False):
            made._is_buffer = True
            if hasattr(t, "persistent"):
                made.persistent = t.persistent  # type: ignore[attr-defined]
        return made
