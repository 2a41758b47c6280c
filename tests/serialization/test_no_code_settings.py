"""No code: what compiling under the settings of a hostile file makes inductor do, in a fresh process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from processes import fresh

import torch_fakeify as tfk
from torch_fakeify.records.frame import SettingDesc, SurroundingsDesc
from torch_fakeify.records.tensor import ListValue, TupleValue

if TYPE_CHECKING:
    from pathlib import Path

    from torch_fakeify.records.frame import ConfigModule

PROGRAM = """
import json, os, sys, warnings

import torch._inductor.compile_fx
import torch_fakeify as tfk

warnings.simplefilter("ignore")
started, written, connected = set(), set(), []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def hook(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "pty.spawn"):
        first = args[0] if event == "os.system" else args[1][0] if event == "subprocess.Popen" else args[0]
        started.add(os.path.basename(str(first)))
    elif event == "open" and isinstance(args[2], int) and args[2] & WRITING:
        written.add(str(args[0]))
    elif event.startswith("socket.connect"):
        connected.append(str(args))


sys.addaudithook(hook)
torch._inductor.config.cpp_cache_precompile_headers = False  # ten seconds for one kernel
capture = tfk.Capture.load(sys.argv[1])
if sys.argv[2] == "trust":
    with capture.settings(trust=True):
        capture.compile("inductor", trust=True)(torch.ones(8))
else:
    capture.compile("inductor")(torch.ones(8))
ours = os.environ["TORCHINDUCTOR_CACHE_DIR"]
outside = sorted(p for p in written if not p.startswith((ours, "/dev/", "/proc/")))
print(json.dumps({"started": sorted(started), "outside": outside, "connected": connected}))
"""

INDUCTOR: ConfigModule = "torch._inductor.config"
HOSTILE = (
    *(("trace.enabled", True), ("trace.debug_dir", "PWNED"), ("save_args", True), ("debug", True)),
    *(("cpp.cxx", TupleValue(items=("touch PWNED",))), ("cpp.march", "native -o PWNED")),
    *(("fx_graph_remote_cache", True), ("autotune_remote_cache", True)),
    *(("global_cache_dir", "PWNED"), ("worker_log_path", "PWNED"), ("compile_threads", 64)),
    *(("enabled_metric_tables", "graph_stats"), ("cpu_backend", "halide")),
    *(("aot_inductor.output_path", "PWNED"), ("triton.proton_profiling", True)),
    *(("run_jit_post_compile_hook", True), ("profile_bandwidth_output", "PWNED")),
    ("reorder_for_compute_comm_overlap_passes", ListValue(items=("os.system",))),
)
OF_DYNAMO = (
    *(("cprofile", True), ("replay_record_enabled", True), ("repro_after", "aot")),
    *(("debug_dir_root", "PWNED"), ("log_file_name", "PWNED"), ("debug_backend_override", "x")),
)


def _settings(module: ConfigModule, rows: Any) -> tuple[SettingDesc, ...]:
    return tuple(SettingDesc(module=module, name=name, value=value) for name, value in rows)


def compiled(
    folder: Path, surroundings: SurroundingsDesc, *, trust: bool = False
) -> dict[str, Any]:
    """What a process does that compiles a capture with these surroundings."""
    folder.mkdir()
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    desc = tfk.capture(gm, [torch.ones(8)]).desc
    tfk.Capture(msgspec.structs.replace(desc, surroundings=surroundings)).save(folder / "c.fkf")
    (folder / "cwd").mkdir()
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder / "cache"),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # known without a compilation for each instruction set
    }
    (folder / "cache").mkdir()
    args = ("-B", "-c", PROGRAM, folder / "c.fkf", "trust" if trust else "")
    done = fresh(*args, cwd=folder / "cwd", **env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    left = {*(folder / "cwd").iterdir(), *(p for p in folder.rglob("*") if "PWNED" in p.name)}
    return {**found, "left": sorted(str(path.relative_to(folder)) for path in left)}


@pytest.mark.sweep
def test_the_settings_of_a_hostile_file_make_inductor_do_nothing_else(tmp_path: Path) -> None:
    """It starts the programs, and writes where it does, for a file without settings."""
    hostile = SurroundingsDesc(
        settings=(*_settings(INDUCTOR, HOSTILE), *_settings("torch._dynamo.config", OF_DYNAMO)),
        environment=(("TORCHINDUCTOR_CXX", "touch PWNED"), ("TORCH_COMPILE_DEBUG", "1")),
    )
    plain = compiled(tmp_path / "plain", SurroundingsDesc())
    assert (plain["connected"], plain["left"]) == ([], [])
    assert compiled(tmp_path / "hostile", hostile) == plain
    # The observation would see it: a trusted file does what its settings say.
    traced = SurroundingsDesc(settings=_settings(INDUCTOR, HOSTILE[:2]))
    trusted = compiled(tmp_path / "trusted", traced, trust=True)
    assert "cwd/PWNED" in trusted["left"]
    assert trusted["outside"] != plain["outside"]
