"""The program of a fresh interpreter that loads captures and tells what Python's audit hooks saw.

``python audited_loads.py FOLDER``: loads every capture of a folder, sets its settings, rebuilds it, and has its code
generated; twice, because what torch imports when it first does something is no concern of a file;
then once more with each kind of text in it exchanged. Prints a JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "zoo"))

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

PAYLOADS = (
    "x\n    __import__('os').system('touch PWNED')\n#",
    "');__import__('os').system('touch PWNED');('",
    '"""\n__import__("os").system("touch PWNED")\n"""',
    "\\'+__import__('os').system('touch PWNED')+\\'",
    "__import__('os').system('touch PWNED')",
    "\x1b]0;PWNED\x07\x9b2J\u202e\x00",
    "xmlrpc.client.Fault",
    "os.system",
    "__class__",
)
EVENTS = frozenset({
    "exec", "compile", "import", "cpython.run_command", "cpython.run_file", "code.__new__",
    "function.__new__", "marshal.loads", "marshal.load", "marshal.dumps", "webbrowser.open",
    "sys.settrace", "sys.setprofile", "gc.get_objects",
})  # fmt: skip
PREFIXES = (
    "os.", "subprocess.", "socket.", "pickle.", "ctypes.", "shutil.", "tempfile.", "urllib.",
    "http.", "ftplib.", "smtplib.", "pty.", "fcntl.", "mmap.", "signal.", "resource.", "setopencodehook",
)  # fmt: skip
READS = frozenset({"os.listdir", "os.scandir", "os.walk", "os.getxattr", "os.listxattr"})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Audit:
    """What happens while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[list[str]] = []
        self.sources: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            _, mode, flags = args
            if (isinstance(flags, int) and flags & WRITING) or set(mode or "") & set("wxa+"):
                self.events.append([event, str(args[0])])
        elif event == "compile" and isinstance(args[0], (str, bytes)):
            text = args[0].decode() if isinstance(args[0], bytes) else args[0]
            self.sources.append(text)
            self.events.append([event, str(args[1])])
        elif event == "exec":
            self.events.append([event, getattr(args[0], "co_filename", "?")])
        elif event.startswith("marshal."):
            self.events.append([event, ""])  # the code of a module that is imported
        elif event in EVENTS or (event.startswith(PREFIXES) and event not in READS):
            self.events.append([event, str(args[0]) if args else ""])

    def take(self) -> list[list[str]]:
        """What has happened since it was asked last."""
        events, self.events = self.events, []
        return events


AUDIT = Audit()


def rebuild(capture: Any) -> list[str]:
    """Rebuild a frame under its settings and have the code of its graphs generated; the code of each."""
    with capture.settings():
        instance = capture.instantiate()
    codes: list[str] = []
    for module in instance.gm.modules():
        if hasattr(module, "real_recompile"):
            module.real_recompile()
            codes.append(module.code)
    return codes


def calls_in(code: str) -> list[str]:
    """What is in generated code that no graph has: imports, and names that lead to code."""
    found: list[str] = []
    for part in ast.walk(ast.parse(code)):
        match part:
            case ast.Import() | ast.ImportFrom() | ast.ClassDef() | ast.Lambda() | ast.Delete():
                found.append(type(part).__name__)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name in {"system", "os", "eval", "exec", "open", "__import__", "PWNED"}:
                    found.append(name)
            case _:
                pass
    return found


def load_edited(tfk: Any, path: Path) -> None:
    """Load the capture as if a person had edited it: what such a text takes is made once, too."""
    from torch_fakeify.serialization.container import read_container, write_container

    manifest, members = read_container(path)
    spare = path.with_suffix(".edited")
    for name in ("capture.json", "tables.json"):
        edited = {**members, name: members[name].replace(b":", b": ", 1)}
        write_container(spare, edited, features=manifest.features)
        tfk.Capture.load(spare)


def exchange_all(tfk: Any, path: Path, done: set[str]) -> dict[str, Any]:
    """Load the capture with each kind of text exchanged that no other one had."""
    from hostile_records import exchanged, places

    desc = tfk.Capture.load(path).desc
    outcome: dict[str, Any] = {"refused": 0, "loaded": 0, "wrong": [], "kinds": []}
    spare = path.with_suffix(".hostile")
    for kind, place in places(desc, 1):
        if kind in done:
            continue
        done.add(kind)
        outcome["kinds"].append(kind)
        for payload in PAYLOADS:
            if (
                code := _load_one(tfk, exchanged(desc, place, lambda _, text=payload: text), spare)
            ) is None:
                outcome["refused"] += 1
                continue
            outcome["loaded"] += 1
            problems = code + [e for e in AUDIT.take() if not is_of_fx(e)]
            if problems:
                outcome["wrong"].append([kind, payload, problems])
    return outcome


def _load_one(tfk: Any, desc: Any, spare: Path) -> list[Any] | None:
    """What is wrong with the code of a record that went through a file; ``None`` if it is refused."""
    AUDIT.take()
    AUDIT.sources.clear()
    try:
        tfk.Capture(desc).save(spare)
    except tfk.FakeifyError:
        return None
    AUDIT.on = True
    try:
        codes = rebuild(tfk.Capture.load(spare))
    except tfk.FakeifyError as error:
        AUDIT.on = False
        events = [e for e in AUDIT.take() if not is_of_fx(e)]
        text = str(error)
        ugly = [] if text.translate({9: 32, 10: 32}).isprintable() else ["unprintable message"]
        return [*events, *ugly] or None
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        return [f"{type(error).__name__}: {error}"]
    finally:
        AUDIT.on = False
    return [problem for code in {*codes, *AUDIT.sources} for problem in calls_in(code)]


def is_of_fx(event: list[str]) -> bool:
    """Whether FX compiles the code that it has generated of a graph."""
    return event[0] in ("compile", "exec") and event[1].startswith("<eval_with_key>")


def main() -> None:
    """Load everything and tell what happened."""
    folder = Path(sys.argv[1])
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401 - before the audit: it is no concern of a file

    import torch_fakeify as tfk

    report: dict[str, Any] = {"first": {}, "second": {}, "exchanged": {}}
    files = sorted(folder.glob("*.fkf"))
    for turn in ("first", "second"):
        for path in files:
            AUDIT.on = True
            codes = rebuild(tfk.Capture.load(path))
            AUDIT.on = False
            found = [problem for code in codes for problem in calls_in(code)]
            report[turn][path.stem] = [*AUDIT.take(), *found]
    load_edited(tfk, files[0])
    done: set[str] = set()
    for path in files:
        report["exchanged"][path.stem] = exchange_all(tfk, path, done)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
