"""Torch's private ``torch.distributed``: device meshes and process groups."""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

import functools
import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for


from torch_fakeify.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class DeviceMeshes(NamedTuple):
    """Torch's classes and functions for ``DeviceMesh``."""

    device_mesh: Any
    mesh_layout: Any
    flat_layout: Any
    placements: ModuleType
    resolve_group: Callable[[Any], Any]
    """Returns the process group of a name; ``RuntimeError`` if this process has none."""
    forget_shardings: Callable[[], None]
    """Clears the caches of sharding propagation, whose keys are equal for real and traced meshes."""


@functools.cache
def device_meshes() -> DeviceMeshes:
    """Return the classes, imported on first use.

    Raises:
        ConvertError: this build of torch has no ``torch.distributed``.
    """
    if not torch.distributed.is_available():
        raise ConvertError("this build of torch has no torch.distributed")
    import torch.distributed.tensor.placement_types as placements
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

    debug = import_module("torch.distributed.tensor.debug")
    forget = getattr(debug, "_clear_sharding_prop_cache", lambda: None)
    classes = DeviceMesh, _MeshLayout, _FlatLayout
    return DeviceMeshes(*classes, placements, _resolve_process_group, forget)


def process_groups() -> tuple[Any, Any, Any]:
    """Return ``FakeStore``, the constructor of a process group with a name, and the table of groups."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore, _new_process_group_helper, _world


def live_meshes() -> list[Any]:
    """Return the device meshes of this process. It takes some 50 ms: all objects are looked at."""
    cls = device_meshes().device_mesh
    return [obj for obj in gc.get_objects() if type(obj) is cls]


def group_names() -> list[str]:
    """Return the names of the process groups that this process is a member of, in the order of their making."""
    from torch.distributed.distributed_c10d import _world

    return [str(name) for name in _world.pg_names.values()]


def local_sizes(
    sizes: tuple[int, ...],
    mesh_sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
) -> tuple[int, ...]:
    """Return the sizes of the local tensor at a coordinate of a mesh, by torch's own rule."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    found, _ = _compute_local_shape_and_global_offset(
        sizes, mesh_sizes, list(coordinate), placements, skip_offset=True
    )
    return tuple(int(n) for n in found)
