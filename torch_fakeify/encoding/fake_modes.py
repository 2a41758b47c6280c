"""Settings of a ``FakeTensorMode`` <-> record; see `attribute_policies.FAKE_MODE_ATTRIBUTES`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.compat.attribute_policies import FAKE_MODE_ATTRIBUTES, unknown_attributes
from torch_fakeify.compat.torch_dispatch import functorch_config_patch
from torch_fakeify.compat.torch_fakes import FakeTensorMode
from torch_fakeify.compat.torch_symbols import SingletonInt
from torch_fakeify.errors import CaptureError, FormatError, class_name
from torch_fakeify.records.frame import FakeModeDesc

from .nested_ints import MAX_NESTED_INT

if TYPE_CHECKING:
    from torch_fakeify.compat.torch_symbols import ShapeEnv


def describe_fake_mode(mode: FakeTensorMode) -> FakeModeDesc:
    """The record of a mode's settings.

    Raises:
        CaptureError: the mode is of a subclass, or has an attribute that no supported torch has.
    """
    if type(mode) is not FakeTensorMode:
        raise CaptureError(
            "a fake tensor mode of a class of its own",
            expected="FakeTensorMode",
            found=class_name(type(mode)),
            fix="Capture with inputs of a plain FakeTensorMode",
        )
    unknown = unknown_attributes(mode, FAKE_MODE_ATTRIBUTES)
    if unknown:
        raise CaptureError(
            "the FakeTensorMode has an attribute that a record does not know",
            expected="the attributes of torch's FakeTensorMode",
            found=", ".join(unknown),
            fix="Remove the attribute, or use a version of torch_fakeify for this torch",
        )
    values = () if mode.shape_env is None else mode.shape_env.backed_var_to_val.values()
    nested = any(isinstance(value, SingletonInt) for value in values)
    by_rule = mode.static_shapes is (mode.shape_env is None)
    return FakeModeDesc(
        allow_fallback_kernels=mode.allow_fallback_kernels,
        allow_non_fake_inputs=mode.allow_non_fake_inputs,
        export=mode.fake_tensor_converter.export,
        static_shapes=None if by_rule else mode.static_shapes,
        allow_scalar_outputs=mode.allow_scalar_outputs,
        allow_meta=mode.allow_meta,
        allow_unsafe_data_ptr_access=mode._allow_unsafe_data_ptr_access,
        # Counters of the process, which matter only with nested ints.
        nt_tensor_id_initial_count=mode.nt_tensor_id_initial_count if nested else None,
        nt_tensor_id_counter=mode.nt_tensor_id_counter if nested else None,
    )


def make_fake_mode(desc: FakeModeDesc, shape_env: ShapeEnv | None) -> FakeTensorMode:
    """A new ``FakeTensorMode`` with recorded settings, independent of torch's current configuration.

    It does not propagate real tensors, since records have none. Its ``ShapeEnv`` is in the recorded state.

    Raises:
        FormatError: the numbers of nested ints are out of range.
    """
    first, following = desc.nt_tensor_id_initial_count, desc.nt_tensor_id_counter
    ends = [n for n in (0, first, following, MAX_NESTED_INT - 1) if n is not None]
    if (first is None) != (following is None) or ends != sorted(ends):
        raise FormatError(
            "numbers of nested ints that torch does not give",
            where="$.fake_mode",
            expected="0 <= nt_tensor_id_initial_count <= nt_tensor_id_counter"
            f" < {MAX_NESTED_INT}, or neither",
            found=f"{first} and {following}",
        )
    with functorch_config_patch(
        fake_tensor_allow_meta=desc.allow_meta,
        fake_tensor_allow_unsafe_data_ptr_access=desc.allow_unsafe_data_ptr_access,
        fake_tensor_propagate_real_tensors=False,
    ):
        mode: Any = FakeTensorMode(
            allow_fallback_kernels=desc.allow_fallback_kernels,
            allow_non_fake_inputs=desc.allow_non_fake_inputs,
            shape_env=shape_env,
            static_shapes=desc.static_shapes,
            export=desc.export,
        )
    mode.allow_scalar_outputs = desc.allow_scalar_outputs
    if first is not None:
        mode.nt_tensor_id_initial_count, mode.nt_tensor_id_counter = first, following
    return mode
