"""Live tensors -> descriptions with torch's fields, and their trace events.

Method: ``MetaTensorDescriber`` of torch 2.13, with its order of ids and events: parts that torch
describes before it numbers the tensor come before it here too.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes
from torch_fakeify.compat.torch_dispatch import temporarily_clear_interpreter_stack
from torch_fakeify.compat.torch_dynamo import trace_structured
from torch_fakeify.compat.torch_fakes import (
    CustomClassBase,
    WeakIdKeyDictionary,
    custom_view_func,
    maybe_get_fake_mode,
    maybe_unwrap_fake_script_object,
    next_describer_id,
    safe_grad,
    view_func_of,
)
from torch_fakeify.describe import tensor_state
from torch_fakeify.describe.unsupported import PLAIN, kind_of_keys

from .desc import MetaStorageDesc, MetaTensorDesc

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class MetaTensorDescriber:
    """Describes tensors and storages, the same ones by the same numbers.

    Args:
        copy_data: the descriptions hold the tensors and storages themselves too.
    """

    def __init__(self, *, copy_data: bool = False) -> None:
        self.id: Any = next_describer_id()
        self.next_tensor_id = 0
        self.next_storage_id = 0
        self.lookup_tensor: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.lookup_storage: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.copy_data = copy_data
        self.traced_tensors: set[int] = set()
        self.traced_storages: set[int] = set()

    def get_tensor_id(self, t: torch.Tensor) -> int:
        """The id of a tensor, a new one at its first use."""
        number = self.lookup_tensor.get(t)
        if number is None:
            number = self.lookup_tensor[t] = self.next_tensor_id
            self.next_tensor_id += 1
        return number

    def get_storage_id(self, s: torch.UntypedStorage) -> Any:
        """The id of a storage, a new one at its first use."""
        number = self.lookup_storage.get(s)
        if number is None:
            number = self.lookup_storage[s] = self.next_storage_id
            self.next_storage_id += 1
        return number

    def describe_storage(
        self,
        s: torch.UntypedStorage,
        *,
        data: torch.Tensor | None = None,
        trace: bool = False,
    ) -> MetaStorageDesc:
        """The description of a storage.

        Args:
            s: the storage.
            data: a tensor on it, which the description holds in its place.
            trace: whether to write the event, once for each storage.
        """
        held: Any = s if self.copy_data and data is None else data
        d = MetaStorageDesc(id=self.get_storage_id(s), size=s.size(), data=held)
        if trace and d.id not in self.traced_storages:
            trace_structured("describe_storage", metadata_fn=lambda: d.as_json(self.id))
            self.traced_storages.add(d.id)
        return d

    def describe_tensor(
        self, t: torch.Tensor, *, recurse: bool = True, trace: bool = False
    ) -> MetaTensorDesc[Any]:
        """The description of a tensor.

        Args:
            t: the tensor, real, fake or wrapped.
            recurse: whether to describe the base of a view and the parts of a sparse tensor.
            trace: whether to write the events, once for each tensor and storage.

        Raises:
            RuntimeError: a functional tensor is a view.
        """
        fields = self._plain(t, recurse, trace)
        if fields is None:
            fields = self._any(t, recurse, trace)
        d = MetaTensorDesc.of(fields)
        if trace and d.id not in self.traced_tensors:
            trace_structured("describe_tensor", metadata_fn=lambda: d.as_json(self.id))
            self.traced_tensors.add(d.id)
        return d

    # --- the fields -----------------------------------------------------------------------------

    def _plain(self, t: torch.Tensor, recurse: bool, trace: bool) -> dict[str, Any] | None:
        """The fields of a dense tensor without wrappers or bits; ``None`` for all others."""
        cls = type(t)
        if (
            (cls is not _Tensor and cls is not _Parameter)
            or torch_dispatch.torch_function_depth()
            or kind_of_keys(torch_dispatch.dispatch_keys(t).raw_repr()) != PLAIN
            or self.copy_data
        ):
            return None
        leaf = tensor_state.is_leaf(t)
        storage = self.describe_storage(t.untyped_storage(), trace=trace)
        fields: dict[str, Any] = {
            "id": self.get_tensor_id(t),
            "storage": storage,
            "is_leaf": leaf,
            "requires_grad": t.requires_grad,
            "ndim": t.dim(),
            "dtype": t.dtype,
            "is_parameter": cls is _Parameter,
            "device": t.device,
            "size": t.size(),
            "stride": t.stride(),
            "storage_offset": t.storage_offset(),
            "dynamo_dynamic_indices": [],
            "dynamo_hint_overrides": {},
            "view_func": custom_view_func(t),
        }
        if t.__dict__:
            fields["dynamo_dynamic_indices"] = list(getattr(t, "_dynamo_dynamic_indices", ()))
            fields["dynamo_hint_overrides"] = getattr(t, "_dynamo_hint_overrides", {})
        registry = tensor_state.nested_int_registry()
        if registry:
            self._nested_int(t, fields, registry)
        grad = t.grad if leaf else safe_grad(t)
        if grad is not None:
            fields["grad"] = self.describe_tensor(grad, trace=trace)
        if t._is_view():
            self._view(t, fields, recurse, trace)
        return fields

    def _any(self, t: torch.Tensor, recurse: bool, trace: bool) -> dict[str, Any]:
        data = torch_fakes.without_functional(t) if self.copy_data else None
        leaf = tensor_state.is_leaf(t)
        view = t._is_view()
        layout = t.layout
        wrapper = torch_fakes.is_traceable_wrapper_subclass(t)
        compressed = tensor_state.is_sparse_compressed(layout)
        fields: dict[str, Any] = {
            "is_leaf": leaf,
            "is_view": view,
            "is_sparse": t.is_sparse,
            "layout": layout,
            "is_nested": t.is_nested,
            "is_traceable_wrapper_subclass": wrapper,
            "is_functorch_wrapped": torch_dispatch.is_functorch_wrapped(t),
            "is_mkldnn": t.is_mkldnn,
            "is_batchedtensor": torch_dispatch.is_batched(t),
            "is_legacy_batchedtensor": torch_dispatch.functorch_is_legacy_batched(t),
            "is_gradtrackingtensor": torch_dispatch.is_gradtracking(t),
            "is_functional": torch_dispatch.is_functional(t),
        }
        shapeless = fields["is_sparse"] or compressed or (fields["is_nested"] and not wrapper)
        if not (
            shapeless
            or fields["is_mkldnn"]
            or fields["is_functorch_wrapped"]
            or fields["is_legacy_batchedtensor"]
        ):
            held = data if torch_fakes.WHOLE_STORAGES else None
            fields["storage"] = self.describe_storage(t.untyped_storage(), data=held, trace=trace)
            fields["storage_offset"] = t.storage_offset()
        if not shapeless:
            fields["stride"] = t.stride()
        self._unwrapped(t, fields, trace)
        if wrapper:
            self._parts(t, fields, trace)
        fields["view_func"] = view_func_of(t)
        fields |= {
            "id": self.get_tensor_id(t),
            "is_inference": not torch_fakes.inference_hidden() and t.is_inference(),
            "requires_grad": t.requires_grad,
            "ndim": t.dim(),
            "dtype": t.dtype,
            "is_conj": t.is_conj(),
            "is_neg": t.is_neg(),
            "is_parameter": isinstance(t, _Parameter),
            "device": t.device,
            "size": t.size(),
            "dynamo_dynamic_indices": list(getattr(t, "_dynamo_dynamic_indices", ())),
            "dynamo_hint_overrides": getattr(t, "_dynamo_hint_overrides", {}),
        }
        registry = tensor_state.nested_int_registry()
        if registry:
            self._nested_int(t, fields, registry)
        if fields["is_sparse"] or compressed:
            self._sparse(t, fields, recurse, trace)
        grad = safe_grad(t)
        if grad is not None:
            fields["grad"] = self.describe_tensor(grad, trace=trace)
        if fields["is_batchedtensor"] or fields["is_gradtrackingtensor"]:
            fields["level"] = torch_dispatch.get_level(t)
        if fields["is_batchedtensor"]:
            fields["bdim"] = torch_dispatch.get_bdim(t)
        if view:
            self._view(t, fields, recurse, trace)
        fields["fake_mode"] = maybe_get_fake_mode(t)
        fields["data"] = data
        return fields

    def _unwrapped(self, t: torch.Tensor, fields: dict[str, Any], trace: bool) -> None:
        """What functorch and functionalization have wrapped; asking them brings ``t`` up to date."""
        functorch = fields["is_functorch_wrapped"]
        if fields["is_batchedtensor"] or fields["is_gradtrackingtensor"]:
            fields["unwrapped"] = self.describe_tensor(torch_dispatch.get_unwrapped(t), trace=trace)
        elif fields["is_functional"] and t.device.type not in ("xla", "lazy"):
            if t._is_view():
                raise RuntimeError(
                    "Cannot safely fakify a view because this process drops the view information"
                    " right now."
                )
            if functorch:
                inner = torch_dispatch.unwrap_functional(t)
                fields["unwrapped"] = self.describe_tensor(inner, trace=trace)
                # A functional tensor does not know its level: it is taken for that of the call.
                fields["current_level"] = torch_dispatch.functorch_level()
            else:
                torch_dispatch.sync_functional(t)
                inner = torch_dispatch.from_functional(t)
                fields["unwrapped"] = self.describe_tensor(inner, trace=trace)
                fields["autograd_meta_from"] = t
        if functorch:
            with temporarily_clear_interpreter_stack() as stack:
                fields["functorch_stack"] = stack

    def _parts(self, t: Any, fields: dict[str, Any], trace: bool) -> None:
        if not hasattr(t, "__tensor_flatten__"):
            raise AssertionError("Traceable wrapper subclass must have __tensor_flatten__ method")
        names, fields["ctx"] = t.__tensor_flatten__()
        attrs = fields["attrs"] = {}
        opaque_attrs: dict[str, Any] = {}
        for name in names:
            part = getattr(t, name)
            if isinstance(part, _Tensor):
                attrs[name] = self.describe_tensor(part, trace=trace)
            elif isinstance(part, CustomClassBase):
                opaque_attrs[name] = maybe_unwrap_fake_script_object(part)
            else:
                raise AssertionError(
                    f"expected Tensor or {CustomClassBase.__name__}, got {type(part)}"
                )
        fields["opaque_attrs"] = opaque_attrs or None
        fields["type"] = type(t)

    def _sparse(self, t: Any, fields: dict[str, Any], recurse: bool, trace: bool) -> None:
        fields["sparse_dim"] = t.sparse_dim()
        fields["dense_dim"] = t.dense_dim()
        if fields["is_sparse"]:
            fields["is_coalesced"] = t.is_coalesced()
            return
        if not recurse:  # the base of the values is the tensor itself
            return
        for name in (*_INDICES[fields["layout"]], "values"):
            fields[name] = self.describe_tensor(getattr(t, name)(), recurse=False, trace=trace)

    def _view(self, t: torch.Tensor, fields: dict[str, Any], recurse: bool, trace: bool) -> None:
        fields["is_view"] = True
        fields["creation_meta"] = torch_dispatch.get_creation_meta(t)
        base = t._base
        if recurse and base is not None:
            fields["base"] = self.describe_tensor(base, trace=trace)

    @staticmethod
    def _nested_int(t: torch.Tensor, fields: dict[str, Any], registry: Any) -> None:
        if t in registry:
            fields["nested_int"] = registry[t].node.nested_int()
