"""Recorded settings: which a file may set, what a record may hold, and that torch's come back."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import Any

import msgspec
import pytest
import torch

import torch_fakeify as tfk
from torch_fakeify.compat import torch_configs
from torch_fakeify.encoding import surroundings
from torch_fakeify.encoding.settings import settings_to_set, with_settings
from torch_fakeify.encoding.surroundings import CONFIG_MODULES, INDUCTOR, with_packages
from torch_fakeify.errors import FormatError, LimitError, WriteError
from torch_fakeify.records.frame import CaptureDesc, SettingDesc, SurroundingsDesc
from torch_fakeify.records.tensor import (
    DictValue,
    FloatValue,
    ListValue,
    TupleValue,
    TypeValue,
    Value,
)
from torch_fakeify.serialization.capture_file import read_capture, write_capture

DYNAMO, _, FUNCTORCH, FX = CONFIG_MODULES
COMMAND = "touch PWNED"


def setting(name: str, value: Value, module: Any = INDUCTOR, **more: bool) -> SettingDesc:
    """A setting, of inductor by default."""
    return SettingDesc(module=module, name=name, value=value, **more)


def set_from(*settings: SettingDesc, trust: bool = False) -> dict[str, Any]:
    """The values that a file's settings set, by name."""
    values, _ = settings_to_set(SurroundingsDesc(settings=settings), trust=trust)
    return {name: value for changes in values.values() for name, value in changes.items()}


def plain_frame() -> CaptureDesc:
    """A frame without settings."""
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    return tfk.capture(gm, [torch.ones(2)]).desc


# --- what a file may set --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "safe",
    [
        setting("max_autotune", value=True),
        setting("max_autotune_gemm_backends", "ATEN,CPP"),
        setting("max_autotune_gemm_search_space", "EXHAUSTIVE"),
        setting("triton.multi_kernel", 3),
        setting("cpp.simdlen", 8),
        setting("cpp.simdlen", None),
        setting("cpu_gpu_bw", 4),
        setting("multi_kernel_hints", ListValue(items=(1, 2))),
        setting("cuda.cutlass_dynamic_cluster_shape", TupleValue(items=(1, 1, 1))),
        setting("activation_memory_budget", 0.5, FUNCTORCH),
        setting("activation_memory_budget_solver", "ilp", FUNCTORCH),
        setting("fake_tensor_cache_enabled", False, DYNAMO),
        setting("use_duck_shape", False, FX),
    ],
    ids=lambda s: s.name,
)
def test_numbers_and_words_are_set(safe: SettingDesc) -> None:
    """They are of the kind of torch's own default, or of the declared type."""
    assert list(set_from(safe)) == [safe.name]


@pytest.mark.parametrize(
    "unsafe",
    [
        setting("cpp.cxx", TupleValue(items=(COMMAND,))),
        setting("cpp.cxx", TupleValue(items=(None, 1))),
        setting("cpp.march", "native -fplugin=x.so"),
        setting("cuda.cutlass_dir", "/tmp"),
        setting("cuda.cuda_cxx", COMMAND),
        setting("cuda.compile_opt_level", "-O1 -x"),
        setting("max_autotune_gemm_backends", "ATEN;x"),
        setting("halide.cpu_target", "host"),
        setting("cpu_backend", "halide"),
        setting("trace.enabled", value=True),
        setting("trace.debug_dir", "x"),
        setting("save_args", value=True),
        setting("fx_graph_remote_cache", value=True),
        setting("autotune_remote_cache", value=True),
        setting("global_cache_dir", "x"),
        setting("compile_threads", 4000),
        setting("worker_log_path", "x"),
        setting("worker_start_method", "spawn"),
        setting("autotune_in_subproc", value=True),
        setting("triton.proton_profiling", value=True),
        setting("triton.store_cubin", value=True),
        setting("enabled_metric_tables", "graph_stats"),
        setting("reorder_for_compute_comm_overlap_passes", ListValue(items=("raise_comms",))),
        setting("_fuse_ddp_communication_passes", ListValue(items=("os",))),
        setting("post_grad_custom_pre_pass", COMMAND),
        setting("pre_grad_fusion_options", DictValue(items=(("x", 1),))),
        setting("aot_inductor.output_path", "x"),
        setting("debug_dir_root", "x", DYNAMO),
        setting("debug_backend_override", "other", DYNAMO),
        setting("repro_after", "dynamo", DYNAMO),
        setting("replay_record_enabled", True, DYNAMO),
        setting("cprofile", True, DYNAMO),
        setting("log_file_name", "x", DYNAMO),
        setting("compiled_autograd_kwargs_override", DictValue(items=()), DYNAMO),
        setting("memory_budget_pareto_dir", "x", FUNCTORCH),
        setting("visualize_memory_budget_pareto", True, FUNCTORCH),
        setting("max_autotune", 1),
        setting("max_fusion_size", "8"),
    ],
    ids=lambda s: s.name,
)
def test_what_could_run_or_write_is_set_if_trusted(unsafe: SettingDesc) -> None:
    """Also values of another kind than torch's, which nobody has looked at."""
    assert set_from(unsafe) == {}
    _, (refused,) = settings_to_set(SurroundingsDesc(settings=(unsafe,)))
    assert (refused.setting, refused.trustable) == (f"{unsafe.module}.{unsafe.name}", True)
    assert list(set_from(unsafe, trust=True)) == [unsafe.name]


TEXTS = (COMMAND, "/tmp/x", "../x", "-x", "https://x", "$(x)", "a b", "")


def test_no_setting_takes_a_text_that_is_no_word() -> None:
    """Of every setting that this torch has: neither as it is, nor in a container."""
    for module in CONFIG_MODULES:
        for name in importlib.import_module(module)._config:
            for text in TEXTS:
                values = (
                    text, ListValue(items=(text,)), TupleValue(items=(None, text)),
                    DictValue(items=((text, text),)), DictValue(items=((text, 1),)),
                )  # fmt: skip
                found = set_from(*(setting(name, value, module) for value in values))
                assert found == {}, (module, name, text)


def test_no_setting_with_a_path_or_a_function_as_its_default_is_set() -> None:
    """Names that a later torch adds are refused by the default's kind, whatever they are called."""
    for module in CONFIG_MODULES:
        config = importlib.import_module(module)
        for name in config._config:
            known = torch_configs.find_setting(module, name)
            if known is None:
                continue
            is_path = isinstance(known.default, str) and "/" in known.default
            if is_path or "Callable" in str(known.hint) or "CustomGraphPass" in str(known.hint):
                values: tuple[Value, ...] = (True, 1, 0.5, "word", ListValue(items=(1,)))
                for value in values:
                    kept = set_from(setting(name, value, module))
                    assert not (is_path and kept), name
                    assert not any(isinstance(v, str) for v in kept.values()), name


def test_names_that_are_no_settings_are_named() -> None:
    """Those of another torch, other names of a setting, and what Python would find in a module."""
    for name in ("of_torch_9", "cache_size_limit", "patch", "__class__", "os.system", ""):
        assert set_from(setting(name, True, DYNAMO), trust=True) == {}
    _, (refused,) = settings_to_set(SurroundingsDesc(settings=(setting("x", 1),)))
    assert refused.text == f"{INDUCTOR}.x: this torch has no such setting"


def test_an_option_is_stronger_and_a_redacted_value_is_not_set() -> None:
    """The order is that of `torch.compile`; a value without its private parts is another one."""
    first = setting("max_fusion_size", 3)
    assert set_from(first, setting("max_fusion_size", 8, option=True)) == {"max_fusion_size": 8}
    shadow = setting("max_fusion_size", COMMAND, option=True)
    assert set_from(first, shadow) == {}
    assert set_from(setting("debug_dir_root", ".../x", DYNAMO, redacted=True), trust=True) == {}


def test_torchs_settings_are_restored() -> None:
    """Also after an exception, and inside another setting of the same."""
    config = torch._inductor.config
    desc = SurroundingsDesc(settings=(setting("max_fusion_size", 3),))
    before = config.max_fusion_size
    seen: list[Any] = []

    def failing() -> None:
        with with_settings(desc) as not_set:
            seen.extend([not_set, config.max_fusion_size])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert seen == [(), 3]
    assert config.max_fusion_size == before
    with config.patch(max_fusion_size=9):
        with with_settings(desc):
            assert config.max_fusion_size == 3
        assert config.max_fusion_size == 9


# --- what is recorded -----------------------------------------------------------------------------


def test_values_are_plain_data_without_private_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are recorded by name; paths are cut; secrets and other variables stay behind."""
    monkeypatch.setenv("TORCHINDUCTOR_HOME_OF_X", "/home/somebody/x/y")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "0123456789secret")
    monkeypatch.setenv("TRITON_NOTE", "0123456789secret")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/somebody/cache")
    monkeypatch.setenv("MINE", "1")
    changes: dict[str, Any] = {
        "post_grad_custom_pre_pass": lambda graph: None,
        "max_fusion_size": 7,
        "cpu_gpu_bw": float("inf"),
        "worker_log_path": "/home/somebody/secret/log",
        "fx_graph_cache": False,
        "multi_kernel_hints": [1] * 2000,
    }
    with torch._inductor.config.patch(changes):
        found = plain_frame().surroundings
    assert found is not None
    by_name = {s.name: s for s in found.settings if s.module == INDUCTOR}
    assert by_name["max_fusion_size"].value == 7
    assert by_name["cpu_gpu_bw"].value == FloatValue(text="inf")
    assert (by_name["worker_log_path"].value, by_name["worker_log_path"].redacted) == (
        ".../log", True,
    )  # fmt: skip
    assert "fx_graph_cache" not in by_name
    assert set(found.left_out) == {
        f"{INDUCTOR}.post_grad_custom_pre_pass", f"{INDUCTOR}.multi_kernel_hints"
    }  # fmt: skip
    environment = dict(found.environment)
    assert environment["TORCHINDUCTOR_HOME_OF_X"] == ".../y"
    assert environment["TORCH_HUB_TOKEN"] == "<removed>"
    assert "secret" not in environment["TRITON_NOTE"]
    assert not {"MINE", "TORCHINDUCTOR_CACHE_DIR"} & environment.keys()
    assert "somebody" not in str(found)


def test_equal_surroundings_give_equal_bytes(tmp_path: os.PathLike[str]) -> None:
    """The time is recorded by recorders alone."""
    texts = [msgspec.json.encode(plain_frame().surroundings) for _ in range(2)]
    assert texts[0] == texts[1]
    assert plain_frame().compile_seconds is None


@pytest.mark.parametrize(
    ("too_much", "error"),
    [
        (SurroundingsDesc(python="3" * 5000), "texts of at most"),
        (SurroundingsDesc(environment=(("TORCH_X", "1"),) * 2001), "at most 2000 entries"),
        (SurroundingsDesc(settings=(setting("x", 1 << 63),)), "integers of 64 bits"),
        (SurroundingsDesc(settings=(setting("x", ListValue(items=(1,) * 1001)),)), "parts"),
        (SurroundingsDesc(options=(("x", TypeValue(name="os.system")),)), "plain data"),
        (
            SurroundingsDesc(
                settings=(setting("x", DictValue(items=((ListValue(items=()), 1),))),)
            ),
            "plain data",
        ),
    ],
    ids=["text", "entries", "integer", "parts", "class", "key"],
)
def test_surroundings_that_no_process_has_are_refused(
    tmp_path: os.PathLike[str], too_much: SurroundingsDesc, error: str
) -> None:
    """By the writer, and by a reader of what another writer wrote."""
    path = os.path.join(tmp_path, "c.fkf")  # noqa: PTH118
    desc = msgspec.structs.replace(plain_frame(), surroundings=too_much)
    with pytest.raises((WriteError, FormatError), match=error):
        write_capture(path, desc)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_fakeify.serialization.limits.check_surroundings", lambda *_: None)
        write_capture(path, desc)
    with pytest.raises((LimitError, FormatError), match=error):
        read_capture(path)


def test_the_packages_of_operators_and_backends_are_recorded() -> None:
    """A custom operator belongs to the distribution of the module that defines it."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.__module__ = "msgspec.ops"
    operator: Any = torch.library.custom_op("surroundings_test::double", mutates_args=())(double)
    operator.register_fake(torch.empty_like)
    found: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(tfk.capture(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: operator(x) + 1, backend=backend)(torch.ones(2))
    desc = found[0].surroundings
    assert desc is not None
    assert desc.packages == (("msgspec", metadata.version("msgspec")),)
    more = with_packages(desc, ["pytest.backends", "__main__", "torch._dynamo", ""])
    assert dict(more.packages).keys() == {"msgspec", "pytest"}


def test_accelerators_are_asked_once_they_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of fake tensors starts no device; a replay does."""
    started = [False]
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: started[0])
    monkeypatch.setattr(cuda, "get_device_name", lambda at: ["a card", "another"][at])
    monkeypatch.setattr(cuda, "get_device_capability", lambda at: (9, at))
    names = ("cpu", "cuda:0", "cuda:1", "meta", "mps")
    assert [each.device for each in surroundings._devices(names, start=False)] == ["cpu"]
    for now, start in ((True, False), (False, True)):
        started[0] = now
        cpu, first, second = surroundings._devices(names, start=start)
        assert cpu.device == "cpu"
        assert (first.device, first.name, first.capability) == ("cuda:0", "a card", "9.0")
        assert (second.device, second.name, second.capability) == ("cuda:1", "another", "9.1")
