"""Real inputs from records, with recorded dtypes, strides, aliasing and guards, and synthetic data.

Synthetic data must be consistent: indices of a sparse tensor lie in its sizes, offsets of a jagged one
in its values.
"""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.torch_symbols import make_nested_int, nested_int_of_offsets
from torch_fakeify.convert.dtype_views import view_as_dtype
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.opaque_values import decode_constant
from torch_fakeify.encoding.subclasses import (
    context_decoder,
    decode_context,
    decode_opaques,
    unflatten,
)
from torch_fakeify.encoding.values import decode_dtype
from torch_fakeify.encoding.views.replay import replay_view_calls
from torch_fakeify.errors import CaptureError, wrap_torch_errors
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import MetaTensorDesc, NestedIntDesc, SymValue
from torch_fakeify.render.text import int_text

from .data_moves import fill
from .data_search import DataSearch, reads_data
from .requirements import asserts_of, data_symbols
from .size_search import Chosen, choose_sizes, grows
from .symbol_values import Symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch_fakeify.records.frame import CaptureDesc, InputDesc
    from torch_fakeify.records.tensor import SparseDesc, Value


def materialize(
    desc: CaptureDesc,
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    device: str | torch.device | None = None,
    max_bytes: int | None = None,
    rebuild: Callable[[], torch.fx.GraphModule] | None = None,
) -> list[Any]:
    """Real inputs for a captured frame, in placeholder order; arguments and errors as `Capture.materialize`.

    Floating point data of matrices is normal with variance ``1 / size[-1]``, of vectors uniform in
    [0, 1), so that sums, roots and logarithms stay finite; integers are 0 or 1, which are valid
    indices into every dim that torch did not specialize. If a runtime assert fails or an index is out
    of bounds, `data_search` searches other data, in the graph on the CPU that ``rebuild`` returns; also
    data with a requested value of an unbacked symbol that the frame computes from data.
    """
    with wrap_torch_errors("$.shape_env"):
        chosen = _chosen(desc, sizes)
        symbols = Symbols(desc.shape_env, {} if chosen is None else chosen.sizes)
        if chosen is not None and not sizes:
            recorded = Symbols(desc.shape_env, {})  # with recorded hints, if these are the sizes
            same = all(recorded.values.get(name) == n for name, n in chosen.sizes.items())
            symbols = recorded if same else symbols
    device = None if device is None else torch.device(device)

    def make(where: torch.device | None, only: Collection[int] | None = None) -> list[Any]:
        maker = _Maker(symbols, seed, where)
        inputs: list[Any] = []
        with wrap_torch_errors("$.inputs"):
            _check_bytes(maker.plan(desc.inputs), max_bytes)
            for i, entry in enumerate(desc.inputs):
                with wrap_torch_errors(f"$.inputs[{i}]"):
                    needed = only is None or i in only
                    inputs.append(maker.make_input(i, entry) if needed else None)
            # Those that are empty in the record were allocated to make tensors on them.
            for storage in maker.released:
                storage.resize_(0)
        return inputs

    inputs = make(device)
    if rebuild is None or (
        desc.graph.without_data and not (chosen and chosen.requested & chosen.data.keys())
    ):
        return inputs
    names = reads_data(desc, symbols)
    if not names:
        return inputs
    # On the CPU an index out of bounds is an exception; on an accelerator it may end the process.
    cpu = torch.device("cpu")
    search = DataSearch(desc, symbols, chosen, lambda only: make(cpu, only), rebuild(), names)
    fill(inputs, search.data())
    return inputs


def _chosen(desc: CaptureDesc, sizes: Mapping[str, int] | None) -> Chosen | None:
    """Choose values of the symbols; ``None`` for the recorded ones."""
    if sizes:
        return choose_sizes(desc, sizes)
    if not data_symbols(desc) and not asserts_of(desc):
        return None
    try:
        return choose_sizes(desc, {})
    except CaptureError:  # no size is requested: a failed assert is reported when the graph runs
        return None


def _check_bytes(nbytes: int, most: int | None) -> None:
    most = _memory() if most is None else most
    if most is not None and nbytes > most:
        raise CaptureError(
            "the inputs are too large",
            expected=f"at most {most} bytes",
            found=int_text(nbytes),
            fix="Choose smaller sizes, or a larger `max_bytes` if there is room for them",
        )


def _memory() -> int | None:
    """Bytes of memory of this machine; ``None`` if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class _Maker:
    """Makes tensors, one for each record, and storages, one for each storage record."""

    def __init__(self, symbols: Symbols, seed: int, device: torch.device | None) -> None:
        self.symbols = symbols
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.extents: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        """Bytes of its storage that a base must cover for its views, by id."""
        self.released: list[torch.UntypedStorage] = []
        self.meshes = Meshes(str if device is None else lambda _: str(device))
        self.offsets: dict[int, MetaTensorDesc] = {}

    def plan(self, inputs: tuple[InputDesc, ...]) -> int:
        """Compute the bytes of each storage, over all its tensors; return the total."""
        recorded: dict[int, int] = {}
        others = 0
        self._plan_bases(inputs)
        for desc in walk(inputs, MetaTensorDesc, inside=True):
            if desc.nested_int is not None:
                self.offsets[desc.nested_int] = desc
            if desc.subclass is not None:
                continue
            if desc.layout != "strided":
                size = [self.symbols.integer(n, f"tensor {desc.id}") for n in desc.size]
                others += math.prod(size) * decode_dtype(desc.dtype).itemsize
            elif desc.storage is not None:
                storage_id, nbytes = desc.storage.id, desc.storage.nbytes
                needed = self._extent(desc)
                self.extents[storage_id] = max(self.extents.get(storage_id, 0), needed)
                recorded[storage_id] = nbytes if isinstance(nbytes, int) else 0
        return others + sum(max(n, recorded[at]) for at, n in self.extents.items())

    def _plan_bases(self, inputs: tuple[InputDesc, ...]) -> None:
        """Compute how far bases of static sizes must extend for the sizes of their views."""
        own = {entry.tensor.id for entry in inputs if entry.tensor is not None}
        for view in walk(inputs if self.symbols.chosen else (), MetaTensorDesc, inside=True):
            base = view.base
            if base is None or base.id in own or not grows(base):
                continue
            if all(t.layout == "strided" and t.subclass is None for t in (view, base)):
                self.ends[base.id] = max(self.ends.get(base.id, 0), self._extent(view))

    def _extent(self, desc: MetaTensorDesc) -> int:
        size, stride, offset = self._layout(desc)
        return _end(size, stride, offset) * decode_dtype(desc.dtype).itemsize

    def _layout(self, desc: MetaTensorDesc) -> tuple[list[int], list[int], int]:
        where = desc.source.name if desc.source is not None else f"tensor {desc.id}"
        size = [self.symbols.integer(n, where) for n in desc.size]
        stride = [self.symbols.integer(n, where) for n in desc.stride]
        offset = self.symbols.integer(desc.storage_offset, where)
        itemsize = decode_dtype(desc.dtype).itemsize
        missing = self.ends.get(desc.id, 0) - _end(size, stride, offset) * itemsize
        if missing > 0 and stride and max(stride) > 0:
            outer = stride.index(max(stride))
            size[outer] += -(-missing // (stride[outer] * itemsize))
        return size, stride, offset

    def make_input(self, position: int, desc: InputDesc) -> Any:
        if desc.tensor is not None:
            return self.make(desc.tensor)
        if desc.sym is not None:
            if isinstance(desc.sym.hint, NestedIntDesc):
                return self._nested_int(desc.sym.hint, desc.name)
            return self.symbols.scalar(desc.sym, desc.name)
        return decode_constant(desc.value, f"$.inputs[{position}].value", self.meshes)

    def _nested_int(self, n: NestedIntDesc, where: str) -> torch.SymInt:
        """The nested int of the offsets that have it in the record."""
        offsets = self.offsets.get(n.id)
        if offsets is None:
            raise CaptureError(
                "no input has the offsets of a nested int", where=where, found=str(n)
            )
        return nested_int_of_offsets(self.make(offsets)) * n.coeff

    def make(self, desc: MetaTensorDesc) -> torch.Tensor:
        done = self.tensors.get(desc.id)
        if done is not None:
            return done
        with torch.inference_mode() if desc.is_inference else nullcontext():
            if desc.base is None:
                tensor = self._make_root(desc)
            else:
                tensor = self._make_view(desc)
                creation_meta = getattr(
                    torch_dispatch.CreationMeta, desc.creation_meta or "DEFAULT"
                )
                torch_dispatch.set_creation_meta(tensor, creation_meta)
        if desc.is_conj:
            torch_dispatch.set_conj(tensor, True)
        if desc.is_neg:
            torch_dispatch.set_neg(tensor, True)
        if desc.grad is not None:
            tensor.grad = self.make(desc.grad)
        self.tensors[desc.id] = tensor
        return tensor

    def _make_root(self, desc: MetaTensorDesc) -> torch.Tensor:
        with torch.no_grad():
            tensor = self._make_kind(desc)
        if desc.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=desc.requires_grad)
        if desc.is_buffer:
            tensor = torch.nn.Buffer(tensor, persistent=desc.persistent is not False)
        if desc.requires_grad and desc.is_leaf:
            return tensor.requires_grad_()
        if not desc.requires_grad:
            return tensor
        # A context may have made a leaf require grad already.
        return _with_history(tensor.requires_grad_(False))

    def _make_kind(self, desc: MetaTensorDesc) -> torch.Tensor:
        if desc.subclass is not None:
            return self._make_wrapper(desc)
        where = f"tensor {desc.id}"
        if desc.functorch is not None or desc.functional is not None:
            kind = "functorch" if desc.functorch is not None else "functional"
            raise CaptureError(
                f"a {kind} tensor exists only inside its transform",
                where=where,
                fix="Materialize the frame that calls the transform",
            )
        device = self._device(desc)
        if desc.layout == "strided":
            return self._make_plain(desc, device)
        size = [self.symbols.integer(n, where) for n in desc.size]
        dtype = decode_dtype(desc.dtype)
        if desc.layout == "_mkldnn":
            return self._random(math.prod(size), dtype, desc).reshape(size).to_mkldnn()
        return self._make_sparse(desc, size, dtype, device)

    def _make_sparse(
        self, desc: MetaTensorDesc, size: list[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a sparse tensor with about half of its entries."""
        facts = desc.sparse
        assert facts is not None
        dense = self._random(math.prod(size), dtype, desc).reshape(size).to(device)
        first = len(size) - facts.dense_dim - facts.sparse_dim
        # One pattern for all batches, which must have equally many entries.
        pattern = torch.zeros(size[first : first + facts.sparse_dim], dtype=torch.bool)
        pattern.view(-1)[::2] = True
        if facts.blocksize:
            rows, columns = facts.blocksize
            pattern = pattern[::rows, ::columns].repeat_interleave(rows, 0)
            pattern = pattern.repeat_interleave(columns, 1)
        pattern = pattern.reshape(pattern.shape + (1,) * facts.dense_dim)
        dense = torch.where(pattern.to(device), dense + (dense == 0), torch.zeros_like(dense))
        return (
            _coo(dense, facts) if desc.layout == "sparse_coo" else _compressed(dense, facts, desc)
        )

    def _make_wrapper(self, desc: MetaTensorDesc) -> torch.Tensor:
        record = desc.subclass
        assert record is not None
        where = f"tensor {desc.id}"
        inner: dict[str, Any] = {name: self.make(part) for name, part in record.tensors}
        if desc.layout == "jagged":
            self._partition(dict(record.tensors), where)

        def number(value: Value) -> Any:
            return self._number(value.sym, where) if isinstance(value, SymValue) else NotImplemented

        decoder = context_decoder(record, number, self.make, self.meshes)
        inner.update(decode_opaques(record, decoder, where=where))
        context = decode_context(record, decoder, where=where)
        size = tuple(self._number(n, where) for n in desc.size)
        stride = tuple(self._number(n, where) for n in desc.stride)
        return unflatten(record, inner, context, size, stride, where=where)

    def _number(self, n: Any, where: str) -> Any:
        """Evaluate a size or symbolic scalar."""
        if isinstance(n, int):
            return n
        nested: Any = getattr(n, "hint", n)
        if isinstance(nested, NestedIntDesc):
            # Real jagged tensors use their offsets instead.
            return make_nested_int(nested.id, nested.coeff)
        return self.symbols.scalar(n, where)

    def _partition(self, parts: dict[str, MetaTensorDesc], where: str) -> None:
        """Fill the offsets and lengths of a jagged tensor with consistent values."""

        def rows_of(name: str) -> int | None:
            return self._number(parts[name].size[0], where) if name in parts else None

        offsets = self.make(parts["_offsets"])
        rows, total = offsets.shape[0] - 1, rows_of("_values") or 0
        # The extreme lengths are the sizes of tensors without elements.
        smallest, largest = rows_of("_min_seqlen_tensor"), rows_of("_max_seqlen_tensor")
        lengths = [total // max(rows, 1) + (i < total % max(rows, 1)) for i in range(rows)]
        if rows > 1 and smallest is not None and largest is not None:
            lengths = _spread(rows, total, smallest, largest) or lengths
        with torch.no_grad():
            offsets.copy_(torch.tensor([0, *lengths]).cumsum(0))
            if "_lengths" in parts:
                self.make(parts["_lengths"]).copy_(torch.tensor(lengths))

    def _make_plain(self, desc: MetaTensorDesc, device: torch.device) -> torch.Tensor:
        size, stride, offset = self._layout(desc)
        tensor = torch.empty(0, dtype=decode_dtype(desc.dtype), device=device)
        tensor.set_(self._storage(desc, device), offset, size, stride)
        hint = self._scalar_hint(desc)
        if hint is not None:
            tensor.fill_(hint)
        return self._pinned(tensor) if desc.is_pinned else tensor

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.accelerator.is_available():
            return tensor.pin_memory()
        if self.device is not None:  # another device was requested
            return tensor
        raise CaptureError(
            "memory can be pinned only where there is an accelerator",
            expected="pinned memory",
            fix='Pass device="cpu"',
        )

    def _make_view(self, desc: MetaTensorDesc) -> torch.Tensor:
        assert desc.base is not None
        base = self.make(desc.base)
        if desc.is_leaf:
            with torch.no_grad():
                view = self._view_of(desc, base)
            # A view made under no_grad requires grad but gets none; `requires_grad_` would
            # change that.
            return view if view.requires_grad == desc.requires_grad else view.requires_grad_()
        with torch.enable_grad():
            if desc.requires_grad and not base.requires_grad:
                with torch.no_grad():
                    base = base.view(base.shape)
                base.requires_grad_()
            return self._view_of(desc, base)

    def _view_of(self, desc: MetaTensorDesc, base: torch.Tensor) -> torch.Tensor:
        if desc.view_calls is not None:
            where = f"tensor {desc.id}"
            if desc.subclass is not None and desc.layout == "jagged":
                self._partition(dict(desc.subclass.tensors), where)
            return replay_view_calls(
                desc.view_calls,
                base,
                symint=lambda n: self._number(n, where),
                tensor=self.make,
                where=where,
            )
        dtype = decode_dtype(desc.dtype)
        base = base if base.dtype == dtype else view_as_dtype(base, dtype)
        return base.as_strided(*self._layout(desc))

    def _storage(self, desc: MetaTensorDesc, device: torch.device) -> torch.UntypedStorage:
        if desc.storage is None:
            return self._fill(self._extent(desc), desc, device)
        done = self.storages.get(desc.storage.id)
        if done is not None:
            return done
        nbytes = desc.storage.nbytes
        if not isinstance(nbytes, int) or self.symbols.chosen:
            nbytes = 0 if nbytes == 0 else self.extents.get(desc.storage.id, self._extent(desc))
        storage = self._fill(nbytes, desc, device)
        if nbytes == 0:
            self.released.append(storage)
        self.storages[desc.storage.id] = storage
        return storage

    def _fill(
        self, nbytes: int, desc: MetaTensorDesc, device: torch.device
    ) -> torch.UntypedStorage:
        dtype = decode_dtype(desc.dtype)
        data = self._random(-(-nbytes // dtype.itemsize), dtype, desc)
        storage = data.to(device).untyped_storage()
        storage.resize_(nbytes)
        return storage

    def _random(self, count: int, dtype: torch.dtype, desc: MetaTensorDesc) -> torch.Tensor:
        if dtype.is_complex:
            half = self._random(2 * count, dtype.to_real(), desc)
            return torch.view_as_complex(half.view(count, 2))
        if dtype.is_floating_point:
            if desc.ndim < 2:
                data = torch.rand(count, generator=self.generator)
            else:
                width = max(1, self.symbols.integer(desc.size[-1], "size[-1]"))
                data = torch.randn(count, generator=self.generator) / width**0.5
        else:
            data = torch.randint(0, 2, (count,), generator=self.generator, dtype=torch.uint8)
        try:
            return data.to(dtype)
        except RuntimeError:  # no conversion to bits and sub-byte dtypes: use any bytes
            size = (count * dtype.itemsize,)
            return torch.randint(0, 2, size, generator=self.generator, dtype=torch.uint8).view(
                dtype
            )

    def _scalar_hint(self, desc: MetaTensorDesc) -> int | float | None:
        if desc.scalar_hint is None or desc.source is None:
            return desc.scalar_hint
        name = self.symbols.by_source.get(f"{desc.source.name}.item()")
        if name is None:
            return desc.scalar_hint
        value = self.symbols.values[name]
        return int(value) if value.is_Integer else float(value)

    def _device(self, desc: MetaTensorDesc) -> torch.device:
        device = torch.device(desc.device) if self.device is None else self.device
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise CaptureError(
                "this machine has no such device",
                where=desc.source.name if desc.source is not None else f"tensor {desc.id}",
                expected=str(device),
                found=str(error).partition("\n")[0],
                fix='Pass device="cpu"',
            ) from error
        return device


class _History(torch.autograd.Function):
    """Identity that gives its input an autograd history."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _origin: torch.Tensor) -> torch.Tensor:
        """Mark the tensor as modified in place, which gives it a history."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:  # noqa: ARG004
        """Return no gradients: the origin is synthetic."""
        return None, None


def _with_history(tensor: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        origin = torch.empty(0, device=tensor.device, requires_grad=True)
        history: Any = _History.apply(tensor, origin)
    return history


def _coo(dense: torch.Tensor, facts: SparseDesc) -> torch.Tensor:
    if not facts.sparse_dim:  # one entry, the whole tensor
        indices = torch.zeros((0, 1), dtype=torch.int64, device=dense.device)
        return torch.sparse_coo_tensor(
            indices, dense[None], dense.shape, is_coalesced=facts.is_coalesced
        )
    made: Any = dense.to_sparse(facts.sparse_dim)
    if facts.is_coalesced:
        return made
    indices, values = made._indices(), made._values()
    # A duplicate entry, so that the tensor is not coalesced.
    return torch.sparse_coo_tensor(
        torch.cat([indices, indices[:, :1]], 1),
        torch.cat([values, values[:1]], 0),
        made.shape,
        is_coalesced=False,
        check_invariants=False,
    )


def _compressed(dense: torch.Tensor, facts: SparseDesc, desc: MetaTensorDesc) -> torch.Tensor:
    convert: Any = getattr(dense, f"to_{desc.layout}")
    blocks: tuple[Any, ...] = (facts.blocksize,) if facts.blocksize else ()
    made = convert(*blocks, dense_dim=facts.dense_dim)
    if facts.index_dtype in (None, "int64"):
        return made
    rows_first = desc.layout in ("sparse_csr", "sparse_bsr")
    compressed = made.crow_indices() if rows_first else made.ccol_indices()
    plain = made.col_indices() if rows_first else made.row_indices()
    return torch.sparse_compressed_tensor(
        compressed.to(torch.int32),
        plain.to(torch.int32),
        made.values(),
        made.shape,
        layout=made.layout,
        check_invariants=False,
    )


def _spread(rows: int, total: int, smallest: int, largest: int) -> list[int] | None:
    """Split a total into parts with a minimum and a maximum part; ``None`` if impossible."""
    parts = [largest, *[smallest] * (rows - 1)]
    rest = total - sum(parts)
    for i in range(1, rows - 1):
        more = max(0, min(rest, largest - smallest))
        parts[i] += more
        rest -= more
    return parts if rest == 0 else None


def _end(size: list[int], stride: list[int], offset: int) -> int:
    """Elements from the start of the storage to the end of a tensor; 0 if it is empty."""
    if 0 in size:
        return 0
    return offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
