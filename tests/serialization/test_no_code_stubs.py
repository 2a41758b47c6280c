"""No code: what registering stubs from the schemas of a hostile file makes a process do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from processes import fresh

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = r"""
import json, os, sys

import msgspec
import torch
import torch._dynamo

import torch_fakeify as tfk
from torch_fakeify.records.frame import OperatorDesc

CODE = "__import__('os').system('touch PWNED')"
SCHEMAS = (
    "away::plain(Tensor x) -> Tensor",
    f'away::plain(Tensor x, str how="{CODE}") -> Tensor',
    f"away::plain(Tensor x, str how='\\n{CODE}') -> Tensor",
    f"away::plain(Tensor x, int n={CODE}) -> Tensor",
    f"away::plain(Tensor x) -> Tensor; {CODE}",
    f"away::plain(Tensor {CODE}) -> Tensor",
    "away::plain(__torch__.os.system x) -> Tensor",
    "away::plain(Tensor __class__) -> Tensor",
    "away::plain(Tensor self, Tensor __builtins__=None) -> Tensor",
    "away::__import__(Tensor x) -> Tensor",
    "os::system(Tensor x) -> Tensor",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
WATCHED = (
    "os.", "subprocess.", "socket.", "pickle.", "ctypes.", "shutil.", "tempfile.", "import", "exec", "compile",
)
READS = ("os.listdir", "os.scandir")
OF_TORCH = b"def __create_fn__("  # of a dataclass in torch's own kernel of autograd
events, on = [], False


def hook(event, args):
    if not on or event in READS:
        return
    if event == "open":
        if isinstance(args[2], int) and args[2] & WRITING:
            events.append([event, str(args[0])])
    elif event.startswith(WATCHED):
        name = getattr(args[0], "co_filename", args[1] if event == "compile" else args[0] if args else "")
        if event == "compile" and isinstance(args[0], bytes) and args[0].startswith(OF_TORCH) and b"PWNED" not in args[0]:
            return
        # What is executed was compiled, and so reported, before.
        if not str(name).startswith("<eval_with_key>") and (event, name) != ("exec", "<string>"):
            events.append([event, str(name)])


sys.addaudithook(hook)
with torch.library._scoped_library("away", "FRAGMENT") as library:
    library.define("plain(Tensor x) -> Tensor")
    torch.library.register_fake("away::plain", torch.empty_like, lib=library)
    frames = []
    torch.compile(lambda x: torch.ops.away.plain(x), backend=lambda gm, i: frames.append(tfk.capture(gm, i)) or gm.forward)(
        torch.ones(2, device="meta")
    )
desc = frames[0].desc
outcomes = []
for turn in range(2):  # what torch imports when it first does something is no concern of a file
    events.clear()
    for schema in SCHEMAS:
        for autograd in (None, "formula", "refused", "composite"):
            operators = (OperatorDesc(schema=schema, autograd=autograd, tags=("os.system", "__class__")),)
            try:
                tfk.Capture(msgspec.structs.replace(desc, operators=operators)).save("c.fkf")
                on = turn == 1
                capture = tfk.Capture.load("c.fkf")
                with capture.operator_stubs() as stubs:
                    capture.instantiate()
                outcomes.append([schema, len(stubs)])
            except tfk.FakeifyError as error:
                outcomes.append([schema, type(error).__name__])
            finally:
                on = False
print(json.dumps({"events": events, "outcomes": outcomes}))
"""


def test_a_schema_makes_a_process_do_nothing(tmp_path: Path) -> None:
    """No program, import, connection or written file; each schema gives a stub or one error."""
    report = json.loads(fresh("-c", PROGRAM, cwd=tmp_path).stdout)
    assert report["events"] == []
    outcomes = dict(report["outcomes"])
    assert outcomes["away::plain(Tensor x) -> Tensor"] == 1
    assert outcomes["os::system(Tensor x) -> Tensor"] == "UnknownNameError"
    assert [path.name for path in tmp_path.iterdir()] == ["c.fkf"]
