"""No code: what loading a capture makes Python do, and what a graph may not name."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from captured_frames import only_capture_of
from hostile_records import exchanged, places
from places import HARNESS
from processes import fresh
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.encoding import names
from torch_fakeify.errors import FakeifyError, FormatError, UnknownNameError
from torch_fakeify.records.frame import DeviceInfoDesc, SettingDesc, SurroundingsDesc
from torch_fakeify.records.graph import NodeDesc
from torch_fakeify.records.tensor import (
    DictValue,
    FunctionValue,
    ListValue,
    NodeValue,
    TupleValue,
    TypeValue,
    Value,
)
from torch_fakeify.render.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc


# --- frames ---------------------------------------------------------------------------------------


def captured(fn: Callable[..., Any], *args: Any, **options: Any) -> tfk.Capture:
    """The capture of the only frame of a function."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        made = only_capture_of(fn, *args, fullgraph=True, **options)
        return tfk.Capture(msgspec.structs.replace(made.desc, backend="eager"))


def _branches(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    y = torch.cond(flag.sum() > 0, lambda x: x.sin(), lambda x: x.cos() + 1, (x,))
    return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), y))


def _guarded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.flatten() + y
    return torch.einsum("i->i", z).relu() if 2 * x.shape[0] > 9 else z


def _from_data(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    n = int(at.max().item())
    torch._check(n >= 0, lambda: "a message of the user's")
    torch._check(n <= x.shape[0])
    return x[:n].clone()


def _settings(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return x @ x.T


def _structured() -> tfk.Capture:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def fn(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": tree["left one"] + tree["right"]}

    with FakeTensorMode() as mode:
        tree = {"left one": torch.ones(3), "right": torch.ones(3)}
        gm = make_fx(fn)(tree)
        del mode
    return tfk.capture(gm, [tree["left one"], tree["right"]])


def _failed(error: str) -> tfk.Capture:
    capture = captured(lambda x: x + 1, torch.ones(3))
    try:
        raise ValueError(error)
    except ValueError as caught:
        return capture.with_failure(caught, backend="mine")


def _surrounded() -> tfk.Capture:
    """A frame whose file has settings that could run or write something, and some that are set."""
    settings = [
        SettingDesc(module="torch._inductor.config", name=name, value=value, option=option)
        for option in (False, True)
        for name, value in (
            ("max_autotune", True),
            ("max_autotune_gemm_backends", "ATEN"),
            ("cpp.cxx", TupleValue(items=("touch PWNED",))),
            ("trace.enabled", True),
            ("trace.debug_dir", "PWNED"),
            ("reorder_for_compute_comm_overlap_passes", ListValue(items=("os.system",))),
        )
    ]
    found = SurroundingsDesc(
        settings=tuple(settings),
        left_out=("torch._inductor.config.joint_custom_pre_pass",),
        mode="a mode",
        options=(("command", "touch PWNED"),),
        environment=(("TORCHINDUCTOR_CXX", "touch PWNED"),),
        python="3.11.7",
        system="Linux",
        machine="x86_64",
        devices=(DeviceInfoDesc(device="cuda:0", name="a device", capability="9.0"),),
        versions=(("torch", "2.13.0"),),
        packages=(("a package", "1.0"),),
    )
    desc = captured(lambda x: x + 1, torch.ones(3)).desc
    return tfk.Capture(msgspec.structs.replace(desc, surroundings=found))


def frames() -> dict[str, tfk.Capture]:
    """Captures of every kind."""
    x = torch.randn(6, 4)
    linear = torch.nn.Linear(4, 3)
    wrapped = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    return {
        "static": captured(lambda x: linear(x).split([1, 2], dim=1), x),
        "dynamic": captured(_guarded, x, torch.randn(24), dynamic=True),
        "views": captured(lambda x, y: x + y, x, x.view(4, 6)[:, 2:].t()[:4].new_zeros(6, 4)),
        "subclass": captured(lambda x: x.mul(2).a + 1, wrapped, dynamic=True),
        "jagged": captured(lambda x: x.sin() * 2, jagged),
        "branches": captured(_branches, x, torch.ones(2)),
        "data": captured(_from_data, x, torch.tensor([2, 3]), dynamic=True),
        "settings": captured(_settings, x),
        "structured": _structured(),
        "failed": _failed("a message"),
        "surroundings": _surrounded(),
    }


FRAMES = (
    *("static", "dynamic", "views", "subclass", "jagged", "branches", "data", "settings"),
    *("structured", "failed", "surroundings"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each."""
    home = tmp_path_factory.mktemp("frames")
    for name, capture in frames().items():
        capture.save(home / f"{name}.fkf")
    return home


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """What an interpreter tells that loads them under an audit hook."""
    done = fresh(HARNESS / "audited_loads.py", folder, cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    assert not (folder / "PWNED").exists()
    return found


def _is_of_fx(event: list[str]) -> bool:
    return event[0] in ("compile", "exec") and event[1].startswith("<eval_with_key>")


IMPORTED = frozenset({
    "torch", "torch_fakeify", "msgspec", "numpy", *sys.stdlib_module_names,
    # what torch and sympy use, or look for
    "colorama", "filelock", "flint", "gmpy", "gmpy2", "mpmath", "networkx", "redis", "sympy",
    "torchdistx", "triton", "z3",
})  # fmt: skip


@pytest.mark.sweep
def test_what_is_imported_is_torchs(report: dict[str, Any]) -> None:
    """The first load imports what torch and this package need: nothing that a file has a say in."""
    for found in report["first"].values():
        imported = {name.partition(".")[0] for event, name in found if event == "import"}
        assert {name for name in imported if not name.startswith("_sysconfigdata")} <= IMPORTED
        kinds = {event for event, _ in found}
        assert kinds <= {"compile", "exec", "import", "marshal.loads", "ctypes.dlsym",
                         "ctypes.dlopen", "function.__new__"}  # fmt: skip


@pytest.mark.sweep
def test_the_second_load_does_nothing_but_compile_the_code_of_graphs(
    report: dict[str, Any],
) -> None:
    """Nothing is imported, written, started, connected or unpickled."""
    assert len(report["second"]) == len(report["first"]) == 11
    for name, found in report["second"].items():
        assert [event for event in found if not _is_of_fx(event)] == [], name
        assert any(map(_is_of_fx, found)), name


def test_no_text_in_a_file_becomes_code(report: dict[str, Any]) -> None:
    """Each kind of text, exchanged for Python code: refused, or text still."""
    kinds: set[str] = set()
    refused = loaded = 0
    for name, outcome in report["exchanged"].items():
        assert outcome["wrong"] == [], name
        kinds.update(outcome["kinds"])
        refused, loaded = refused + outcome["refused"], loaded + outcome["loaded"]
    assert {kind.rpartition(".")[2] for kind in kinds} >= {
        "name", "target", "args", "kwargs", "file", "function", "code", "class_name",
        "submodules", "tensors", "message", "type", "frame", "torch_version", "dtype", "device",
        "cls", "fields", "backend", "arguments", "meta", "items", "value", "left_out", "mode",
        "options", "environment", "python", "capability", "versions", "packages",
    }  # fmt: skip
    assert refused > 500 < loaded


# --- what is printed ------------------------------------------------------------------------------

CONTROLS = "".join(
    char for char in map(chr, range(0x110000)) if unicodedata.category(char) in ("Cc", "Cf", "Cs")
)
"""C0 and C1 controls, those of the direction of text and other invisible ones, surrogates."""


def test_every_control_character_is_escaped() -> None:
    """Also those of right-to-left text, and what ends a line somewhere."""
    others = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) in ("Zl", "Zp")]
    assert len(CONTROLS) > 65 + 12 + 2048
    assert {"\x1b", "\x9b", "\x7f", "\u202e", "\u2066", "\u061c", "\u200f", "\ufeff"} <= set(
        CONTROLS
    )
    for char in (*CONTROLS, *others):
        shown = escape(char)
        assert shown[0] == "\\", hex(ord(char))
        assert shown.isascii()
        assert shown.isprintable()


def test_the_name_of_a_frame_is_shown_without_controls(folder: Path) -> None:
    """Also in a debugger, and by a warning of another version of torch."""
    desc = tfk.Capture.load(folder / "static.fkf").desc
    evil = msgspec.structs.replace(desc, frame="f\x1b[2J\u202e", torch_version="9.9\x9b2J" * 99)
    shown = repr(tfk.Capture(evil))
    assert shown.startswith("<Capture f\\x1b[2J\\u202e: ")
    assert shown.isprintable()
    tfk.Capture(evil).save(folder.parent / "evil.fkf")
    with pytest.warns(tfk.TorchVersionWarning) as told:
        tfk.Capture.load(folder.parent / "evil.fkf")
    assert str(told[0].message).isprintable()
    assert len(str(told[0].message)) < 500


@pytest.mark.parametrize("kind", list(FRAMES))
def test_what_is_printed_has_no_controls(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of text that a file has, exchanged for controls: `show` prints none of them, and no forged line."""
    frame = tfk.Capture.load(folder / f"{kind}.fkf").desc
    evil = "a" + "".join(sorted(set(CONTROLS) & set(map(chr, range(0x2100))))) + "\ufeff b"
    evil += "".join(f"{end}guards(9)" for end in ("\n", "\r\n", "\x85", "\u2028", "\u2029"))
    for what, place in places(frame, 1):
        # No JSON has a lone surrogate.
        for flags in ([], ["--all"], ["--privacy"], ["--json"]):
            text = evil if flags == ["--json"] else f"\udc9b{evil}"
            desc = exchanged(frame, place, lambda _, text=text: text)
            monkeypatch.setattr(cli, "read_capture", lambda _, limits, desc=desc: desc)
            status = cli.main(["show", *flags, "FILE"])
            captured = capsys.readouterr()
            # One of several records of a tensor is another one's now, and is not written as JSON.
            assert status == cli.DONE or "records have the same id" in captured.err, what
            assert "\nguards(9)" not in captured.out, (what, flags)
            for line in (captured.out + captured.err).split("\n"):
                assert line.isprintable(), (what, flags)


# --- what a graph may not name --------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> CaptureDesc:
    """A frame with one dynamic input."""
    return captured(lambda x: x.sin(), torch.randn(5, 6), dynamic=True).desc


def with_nodes(desc: CaptureDesc, *nodes: NodeDesc) -> tfk.Capture:
    """The frame with more nodes before the output; ``NodeValue(-1)`` is the input, -2 the first."""
    own = list(desc.graph.nodes)
    at = next(i for i, fx_node in enumerate(own) if fx_node.name == "l_x_")

    def moved(value: Value) -> Value:
        match value:
            case NodeValue(index=index):
                return NodeValue(index=at if index == -1 else len(own) - 3 - index)
            case ListValue(items=items):
                return ListValue(items=tuple(map(moved, items)))
            case _:
                return value

    placed = [msgspec.structs.replace(n, args=tuple(map(moved, n.args))) for n in nodes]
    graph = msgspec.structs.replace(desc.graph, nodes=(*own[:-1], *placed, own[-1]))
    return tfk.Capture(msgspec.structs.replace(desc, graph=graph))


def call(
    name: str, function: str, *args: Value, kind: str = "function", **kwargs: Value
) -> NodeDesc:
    """A node that calls a function."""
    return NodeDesc(
        op="call_function",
        name=name,
        target=FunctionValue(kind=kind, name=function),
        args=args,
        kwargs=tuple(kwargs.items()),
    )


X = NodeValue(index=-1)
COMMAND = "__import__('os').system('touch PWNED')"


REFUSED = {
    "function": """
        os.system os.popen posix.system subprocess.run shutil.rmtree socket.socket pickle.loads
        builtins.eval builtins.exec builtins.__import__ builtins.compile builtins.open
        builtins.setattr builtins.vars builtins.globals builtins.print builtins.input
        operator.attrgetter operator.methodcaller operator.call operator.itemgetter
        importlib.import_module runpy.run_path functools.partial functools.reduce ctypes.CDLL
        torch.load torch.save torch.from_file torch.frombuffer torch._from_blob torch._print
        torch._VF.from_file torch._VF._from_blob torch._VF.frombuffer torch.compile
        torch.hub.load torch.hub.download_url_to_file torch.hub.load_state_dict_from_url
        torch.ops.load_library torch.ops.import_module torch.classes.load_library
        torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline
        torch.utils.model_zoo.load_url torch.utils.data.DataLoader torch.utils.data.get_worker_info
        torch.jit.load torch.jit.save torch.jit.fork torch.fork torch.jit.script
        torch.import_ir_module torch._C.import_ir_module torch._C.PyTorchFileReader
        torch._C._load_for_lite_interpreter torch._C._import_ir_module_from_package
        torch._C._jit_compile torch._C._demangle torch._C.parse_ir torch._C._set_print_stack_traces_on_fatal_signal
        torch._C._nn._parse_to_file torch.package.PackageImporter torch.package.importer
        torch.serialization.load torch.serialization.save torch.serialization._load
        torch.distributed.launch.main torch.distributed.init_process_group torch.distributed.run.main
        torch.multiprocessing.spawn torch.multiprocessing.start_processes
        torch.set_default_dtype torch.set_num_threads torch.set_default_device
        torch.use_deterministic_algorithms torch.set_printoptions torch._import_dotted_name
        torch.cuda.memory._dump_snapshot torch.cuda.jiterator._create_jit_fn
        torch._dynamo.optimize torch._inductor.compile torch._inductor.codecache.PyCodeCache.load
        torch._numpy.set_default_dtype torch._numpy.fromfile torch._numpy.load numpy.load numpy.fromfile
        torch._numpy.random.deco_stream torch._prims.register_debug_prims torch._refs.out_wrapper
        torch._C._functorch.pop_dynamic_layer_stack torch._C._functorch._set_vmap_fallback_enabled
        torch._C._unset_dispatch_mode torch._C._pop_torch_function_stack
        torch.signal.windows.windows._add_docstr torch.sparse.as_sparse_gradcheck
        torch.masked._ops._apply_docstring_templates torch.nn.init._make_deprecate
        torch.Tensor.tofile torch.Tensor.register_hook torch.Tensor.apply_ torch.Tensor.map_
        torch.Tensor.map2_ torch.Tensor.share_memory_ torch.Tensor.__reduce__
        torch.Tensor.__reduce_ex__ torch.Tensor.__class__ torch.Tensor.__setstate__
        torch.Tensor.module_load torch.Tensor.storage torch.Tensor._typed_storage
        torch.Tensor.register_post_accumulate_grad_hook torch.Tensor.__init_subclass__
    """,
    "op": """
        aten.from_file.default aten.from_file.out aten.save.default aten._print.default
        aten.warn.default debugprims.load_tensor.default symm_mem._rendezvous.default
        prim.rpc_async.default prim.rpc_sync.default prim.rpc_remote.default prim.PythonOp.default
        prim.Print.default prim.RaiseException.default prim.StaticSubgraph.default
        inductor._reinterpret_tensor.default inductor._alloc_from_pool.default
        mkldnn.data_ptr.default image.write_file.default image.read_file.default
        quant_logger.log_tensor.default torchcodec_ns.create_from_file.default
    """,
    "packet": "aten.from_file aten.save aten._print prim.rpc_async prim.Print image.write_file",
    "hop": """
        aoti_call_delegate call_torchbind custom_function_call dynamo_bypassing_wrapper
        executorch_call_delegate flat_apply inductor_compiled_code inline_asm_elementwise
        invoke_leaf_function print trace_wrapped triton_kernel_wrapper_functional
        triton_kernel_wrapper_mutation
    """,
    "class": """
        subprocess.Popen builtins.type builtins.object builtins.memoryview builtins.bytearray
        torch.UntypedStorage torch.FloatStorage torch._C.PyTorchFileReader torch.nn.Module
        torch.ScriptObject io.FileIO pathlib.Path types.FunctionType torch.fx.GraphModule
    """,
    "numpy": "torch._numpy.load torch._numpy.set_default_dtype numpy.load torch.load builtins.eval",
    "numpy_method": """
        tofile dump dumps evaluate_guards_expression __reduce__ __class__ __array_interface__ ctypes
        format encode join setattr system load from_file newbyteorder
    """,
    "numpy_operator": "builtins.eval builtins.exec operator.attrgetter operator.call os.system",
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, text in REFUSED.items() for name in text.split()]
)
def test_functions_that_reach_out_are_refused_by_name(
    plain: CaptureDesc, kind: str, name: str
) -> None:
    """Files, networks, processes, code, and what changes the process for good."""
    capture = with_nodes(plain, call("bad", name, X, kind=kind))
    with pytest.raises(FormatError) as caught:
        capture.instantiate()
    assert f"$.nodes[{len(plain.graph.nodes) - 1}].target" in str(caught.value)
    assert name.rpartition(".")[2] in str(caught.value) or kind in ("op", "packet")


METHODS = """
    tofile dump register_hook register_post_accumulate_grad_hook __reduce__ __reduce_ex__ __class__
    __init_subclass__ __setattr__ __getattribute__ __dict__ apply_ map_ map2_ share_memory_ storage
    _typed_storage _view_func _view_func_unsafe module_load system eval format _init_rpc
    _make_dataclass from_file _write_file _set_from_file load_state_dict evaluate_guards_expression
    create_symbol shape_env
"""
"""Methods that write files, call what they are given, or lead to classes."""
ATTRIBUTES = """
    __class__ __dict__ __globals__ __reduce_ex__ __init__ fake_mode node shape_env grad_fn
    _backward_hooks f_globals gi_frame co_code evaluate_guards_expression tofile dump register_hook
    add_ numpy system py_kernels from_pretrained _python_dispatch _op _schema loader
"""
"""No data of tensors: a chain of these leads from a size to its shape environment, and from there on."""
GIVEN: tuple[Value, ...] = (
    TypeValue(name="torch.UntypedStorage"),
    TupleValue(items=(TypeValue(name="torch.Tensor"),)),
    ListValue(items=(TypeValue(name="enum.Enum"),)),
    DictValue(items=(("fn", TypeValue(name="enum.Enum")),)),
)
"""Classes: one that is called runs its own code, on what the file says."""
CALLING = (
    *(("hop", "wrap"), ("hop", "cond"), ("function", "torch.cond"), ("function", "torch.vmap")),
)
SQRT = FunctionValue(kind="function", name="math.sqrt")
NODES = [
    *(
        (NodeDesc(op="call_method", name="bad", target=method, args=(X,)), method)
        for method in METHODS.split()
    ),
    *(
        (call("bad", f"builtins.{reader}", X, attribute), "may not be read")
        for reader in ("getattr", "hasattr")
        for attribute in ATTRIBUTES.split()
    ),
    *(
        (call("bad", f"builtins.{name}", X, key=SQRT), "may not have a function as argument")
        for name in ("max", "min", "sorted")
    ),
    *(
        (call("bad", name, given, X, kind=kind), "may not have a class as argument")
        for kind, name in CALLING
        for given in GIVEN
    ),
]


@pytest.mark.parametrize(("node", "said"), NODES)
def test_nodes_that_reach_out_are_refused_by_name(
    plain: CaptureDesc, node: NodeDesc, said: str
) -> None:
    """By methods, by attributes, and by arguments that are functions or classes."""
    with pytest.raises(UnknownNameError, match=said):
        with_nodes(plain, node).instantiate()


def test_the_chain_to_a_function_that_evaluates_text_is_closed(
    plain: CaptureDesc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that ran a command when the frame was compiled, each of them refused by itself."""
    monkeypatch.chdir(tmp_path)
    chain = [
        NodeDesc(op="call_method", name="n", target="size", args=(X, 0)),
        call("sym", "builtins.getattr", NodeValue(index=-2), "node"),
        call("env", "builtins.getattr", NodeValue(index=-3), "shape_env"),
        call("ev", "evaluate_guards_expression", NodeValue(index=-4), COMMAND,
             ListValue(items=()), kind="numpy_method"),
    ]  # fmt: skip
    for count in (2, 3, 4):
        with pytest.raises(UnknownNameError):
            with_nodes(plain, *chain[:count]).compile("aot_eager")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "attribute", ["shape", "dtype", "T", "is_cuda", "values", "indices", "eps"]
)
def test_attributes_that_are_data_are_read(plain: CaptureDesc, attribute: str) -> None:
    """Of tensors, dtypes, and what operators return."""
    assert with_nodes(plain, call("got", "builtins.getattr", X, attribute)).instantiate()


def test_an_inner_tensor_is_read_of_its_wrapper_alone(folder: Path) -> None:
    """A subclass tells its inner tensors; the name counts for no other value."""
    capture = tfk.Capture.load(folder / "subclass.fkf")
    nodes = capture.desc.graph.nodes
    (at,) = [i for i, n in enumerate(nodes) if n.args[1:] == ("a",)]
    capture.instantiate()
    for attribute in ("c", "shape_env", "__class__"):
        changed = msgspec.structs.replace(nodes[at], args=(nodes[at].args[0], attribute))
        graph = msgspec.structs.replace(
            capture.desc.graph, nodes=(*nodes[:at], changed, *nodes[at + 1 :])
        )
        with pytest.raises(UnknownNameError, match=f"{attribute!r} may not be read"):
            tfk.Capture(msgspec.structs.replace(capture.desc, graph=graph)).instantiate()
    with pytest.raises(UnknownNameError, match="'inner_of_nothing' may not be read"):
        names.check_attribute("inner_of_nothing", where="$", inner=("a", "b"))
    with pytest.raises(UnknownNameError, match="'node' may not be read"):
        names.check_attribute("node", where="$", inner=("node",))
    assert names.check_attribute("inner_of_nothing", where="$", inner=("inner_of_nothing",))


def test_a_function_of_a_file_is_never_a_graphs_target(plain: CaptureDesc) -> None:
    """The names of a graph's targets are no paths to import."""
    for kind in ("function", "class", "op", "packet", "hop", "numpy"):
        with pytest.raises(FakeifyError):
            with_nodes(plain, call("bad", "xmlrpc.client.dumps", X, kind=kind)).instantiate()
    assert "xmlrpc.client" not in sys.modules or "xmlrpc" in str(sys.modules["xmlrpc.client"])


def _annotated(desc: CaptureDesc, settings: dict[str, Value]) -> tfk.Capture:
    inner = DictValue(items=tuple(settings.items()))
    custom = DictValue(
        items=(("compile_with_inductor", DictValue(items=(("inductor_configs", inner),))),)
    )
    nodes = list(desc.graph.nodes)
    nodes[-2] = msgspec.structs.replace(nodes[-2], meta=(*nodes[-2].meta, ("custom", custom)))
    graph = msgspec.structs.replace(desc.graph, nodes=tuple(nodes))
    return tfk.Capture(msgspec.structs.replace(desc, graph=graph))


def test_annotations_set_no_program_to_run(plain: CaptureDesc) -> None:
    """Regional inductor takes its settings from nodes; ``cpp.cxx`` names a compiler."""
    assert _annotated(plain, {"max_autotune": True, "benchmark_kernel": None}).instantiate()
    for setting in (
        "touch PWNED",
        TupleValue(items=("touch", "PWNED")),
        TypeValue(name="torch.Tensor"),
    ):
        with pytest.raises(FormatError, match="may name programs to run"):
            _annotated(plain, {"cpp.cxx": setting}).instantiate()


def test_such_annotations_are_not_recorded() -> None:
    """What no reader would take stays behind, and the record says so."""
    from torch.fx.traceback import annotate

    def fn(x: torch.Tensor) -> torch.Tensor:
        with annotate({"compile_with_inductor": {"inductor_configs": {"cpp.cxx": "g++"}}}):
            return x.sin()

    capture = captured(fn, torch.ones(3))
    lost = {key: reason for n in capture.desc.graph.nodes for key, reason in n.dropped_meta}
    assert "settings of inductor" in lost["custom"]
    capture.instantiate()
