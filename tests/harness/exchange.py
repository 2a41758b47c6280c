"""Captures written under one version of torch and read under another.

``write DIR`` makes, under the torch that runs it, the captures of the golden corpus anew, those of
real models, and those of what not every version has. ``read PATH... --json FILE`` has every capture
instantiated, captured again, compiled and run beside eager, each in a forked process, and says how it
went. ``table FILE...`` holds what several versions said against what each writer says of its own
captures; it needs no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quiet import quiet

sys.path.append(str(Path(__file__).resolve().parents[1] / "zoo"))

import argparse
import gc
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MODELS = ("t5", "clip", "resnet", "unet")
"""The models that are exchanged, beside those of the golden corpus; others are by name."""

_TIMEOUT = 300.0
"""Seconds that one capture may take to read."""

Row: TypeAlias = "dict[str, str]"
"""How one capture went: see `read_one`."""


# --- write ----------------------------------------------------------------------------------------


def makers(models: Iterable[str]) -> dict[str, Callable[[], list[Any]]]:
    """The functions that make captures, by name: most make one, a model one for each of its frames."""
    from exchange_features import FEATURES
    from golden_cases import cases, model_frames

    single = {**cases(), **{f"feature_{name}": make for name, make in FEATURES.items()}}
    found: dict[str, Callable[[], list[Any]]] = {
        name: lambda make=make: [make()] for name, make in single.items()
    }
    found.update({f"model_{name}": lambda name=name: model_frames(name) for name in models})
    return found


def write(directory: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Write captures, all or those with names like these; returns the errors of others, by name."""
    import model_zoo
    import torch

    import torch_fakeify as tfk

    wanted = list(names)
    models = model_zoo.MODELS if wanted else MODELS
    directory.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for name, make in makers(models).items():
        if wanted and not any(fnmatchcase(name, pattern) for pattern in wanted):
            continue
        torch._dynamo.reset()
        try:
            with quiet():
                frames = make()
        except Exception as error:  # noqa: BLE001 - whoever asked wants to know which
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        for number, frame in enumerate(frames):
            path = directory / (f"{name}.fkf" if len(frames) == 1 else f"{name}-{number}.fkf")
            frame.save(path)
            if tfk.Capture.load(path).desc != frame.desc:
                failed[path.stem] = "another frame is read"
    torch._dynamo.reset()
    return failed


# --- read -----------------------------------------------------------------------------------------


def captures(paths: Iterable[Path]) -> list[Path]:
    """The capture files that are named, and those in the folders that are."""
    return [p for path in paths for p in (sorted(path.glob("*.fkf")) if path.is_dir() else [path])]


def read(paths: Iterable[Path]) -> Iterator[Row]:
    """Read captures, each in a process forked from this one.

    What has one name and is one frame, whoever wrote it, compiles once.
    """
    _warm_up()
    compiled: dict[str, dict[str, Row]] = {}
    for path in paths:
        known = compiled.setdefault(path.stem, {})
        row = _in_a_fork(path, known)
        if fingerprint := row.pop("fingerprint", None):
            known.setdefault(fingerprint, _compiling(row))
        yield {"folder": path.parent.name, "name": path.stem, **row}


def _compiling(row: Row) -> Row:
    """The part of a row that is of the frame, whatever file it comes from."""
    return {key: row[key] for key in ("verdict", "error", "text", "run") if key in row}


def _warm_up() -> None:
    """Import what every child needs: torch's compilers, and the classes and operators of the corpus."""
    import golden_text  # imports what has classes and operators of the corpus
    import torch

    import torch_fakeify.tools.worker.trials
    from torch_fakeify.compat import torch_graphs

    assert golden_text
    assert torch_fakeify.tools.worker.trials
    for backend in ("eager", "aot_eager"):
        torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(3))
    torch._dynamo.reset()
    torch_graphs.higher_order_operators()
    torch_graphs.late_function_modules()
    torch_graphs.meta_dataclasses()
    gc.collect()
    gc.freeze()


def read_one(path: Path, compiled: Mapping[str, Row]) -> Iterator[Row]:
    """How one capture goes, in parts, as they become known.

    Args:
        path: the capture.
        compiled: what became of frames that were compiled, by their fingerprints.

    Yields:
        parts of a row: ``writer`` is the version of torch that wrote it. ``verdict`` is
        ``compiles``; ``refused`` by an error of the package; ``fails``, where the compiler does; or
        ``raises`` anything else. ``error`` and ``text`` are the exception's. ``again`` says of the
        instance, captured again, whether it is the same frame. ``run`` says of what was compiled
        whether it does as eager does.
    """
    import torch_fakeify as tfk
    from torch_fakeify.tools.worker.replies import Failed, NotCompared, Passed, Wrong
    from torch_fakeify.tools.worker.trials import EagerComparison

    try:
        frame = tfk.Capture.load(path)
        fingerprint = frame.fingerprint()
        yield {"writer": frame.desc.torch_version, "fingerprint": fingerprint}
        yield {"again": _again(frame)}
        if fingerprint in compiled:
            yield compiled[fingerprint]
            return
        instance = frame.instantiate()
        try:
            compiled = instance.compile("aot_eager")
        except Exception as error:  # noqa: BLE001 - it is the answer
            yield {"verdict": "fails", **_named(error)}
            return
    except tfk.FakeifyError as error:
        yield {"verdict": "refused", **_named(error)}
        return
    except Exception as error:  # noqa: BLE001 - it is the answer
        yield {"verdict": "raises", **_named(error)}
        return
    yield {"verdict": "compiles", "run": "crashes"}
    try:
        reply = EagerComparison(frame, seed=0).run(compiled, {})
    except Exception as error:  # noqa: BLE001 - there are no such inputs here, or nothing compares them
        yield {"run": type(error).__name__}
        return
    match reply:
        case Passed():
            yield {"run": "same"}
        case Failed(error=error):
            yield {"run": error.type}
        case Wrong(text=text) | NotCompared(text=text):
            yield {"run": text}


def _named(error: BaseException) -> Row:
    return {"error": type(error).__name__, "text": str(error)}


def _again(frame: Any) -> str:
    """Whether the instance, captured again, is the same frame: ``same``, ``other``, or an error."""
    import torch_fakeify as tfk

    instance = frame.instantiate()
    data: Any = "small" if frame.desc.graph.tensor_data else "none"
    try:
        with instance.active():
            made = tfk.capture(instance.gm, instance.inputs, constants=data)
    except tfk.FakeifyError as error:
        return f"{type(error).__name__}: {error}"
    same = made.fingerprint() == frame.fingerprint() or _form(made) == _form(frame)
    return "same" if same else "other"


def _form(frame: Any) -> Any:
    """What a fingerprint is of, with sources as they are made: versions write some of them otherwise."""
    from msgspec.structs import replace

    from torch_fakeify.records import fingerprint
    from torch_fakeify.records.tensor import SourceDesc

    class Canonical(fingerprint._Canonical):
        def value(self, value: Any) -> Any:
            if isinstance(value, SourceDesc):
                return [value.cls, self.value(value.base), self.value(value.fields)]
            return super().value(value)

    canonical, desc = Canonical(), frame.desc
    return [
        [canonical.value(entry.source) for entry in desc.inputs],
        [canonical.input(replace(entry, source=None)) for entry in desc.inputs],
        canonical.graph(desc.graph),
        canonical.value(desc.modes),
        canonical.shape_env(desc.shape_env),
    ]


def _in_a_fork(path: Path, compiled: Mapping[str, Row]) -> Row:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _answer(path, compiled, theirs)
    os.close(theirs)
    data = b""
    until = time.monotonic() + _TIMEOUT
    while select.select([ours], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (piece := os.read(ours, 1 << 16)):
            break
        data += piece
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(ours)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found: Row = {"verdict": "raises", "error": "crash", "text": f"exit status {status}"}
    for line in data.decode().splitlines():
        part: Row = json.loads(line)
        if "verdict" in part:
            found = {key: found[key] for key in found.keys() - {"error", "text"}}
        found |= part
    return found


def _answer(path: Path, compiled: Mapping[str, Row], pipe: int) -> None:
    """What the child does: it never comes back."""
    status = 1
    try:
        warnings.simplefilter("ignore")
        for part in read_one(path, compiled):
            os.write(pipe, json.dumps(part).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


# --- the table ------------------------------------------------------------------------------------

Word: TypeAlias = Literal["compiles", "refused", "as at home", "failure"]


class Reading(NamedTuple):
    """How a capture went elsewhere, beside how it goes where it was written."""

    row: Row
    writer: str
    reader: str
    word: Word
    """``as at home``: it does not compile there either, and fails in the same way."""


def word_of(row: Row, home: Row | None) -> Word:
    """What to call it.

    Args:
        row: how a capture went.
        home: how it goes with the version of torch that wrote it, if that is known.
    """
    if home is not None and _essence(row) == _essence(home):
        return "compiles" if row["verdict"] == "compiles" else "as at home"
    match row["verdict"]:
        case "refused":
            return "refused"
        case "compiles" if row.get("again") == "same" and row.get("run") == "same":
            return "compiles"
        case _:
            return "failure"


def _essence(row: Row) -> list[str | None]:
    return [row.get(key) for key in ("verdict", "error", "again", "run")]


def readings(said: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """What several versions of torch said of captures, each beside what its writer says.

    Args:
        said: the contents of what ``read --json`` writes.
    """
    home = {
        (row["folder"], row["name"]): row
        for found in said
        for row in found["rows"]
        if row.get("writer") == found["torch"]
    }
    writers = {row["folder"]: row["writer"] for row in home.values()}
    return [
        Reading(row, writer, found["torch"], word_of(row, home.get((row["folder"], row["name"]))))
        for found in said
        for row in found["rows"]
        if (writer := row.get("writer") or writers.get(row["folder"], "?"))
    ]


def model_of(name: str) -> str | None:
    """Of which model a capture is a frame, if of one."""
    return name.removeprefix("model_").partition("-")[0] if name.startswith("model_") else None


def table(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """The exchange as Markdown: a table of all captures, one of the models, and what went wrong."""
    found = readings(said)
    folders = list(dict.fromkeys(r.row["folder"] for r in found))
    versions = sorted({r.reader for r in found}, key=_numbers)
    head = ["| written under \\ read under | " + " | ".join(versions) + " |"]
    lines = [*head, "|---" * (len(versions) + 1) + "|"]
    for folder in folders:
        cells = [
            _cell(r for r in found if r.row["folder"] == folder and r.reader == v) for v in versions
        ]
        lines.append(f"| {folder} | " + " | ".join(cells) + " |")
    models = sorted({model for r in found if (model := model_of(r.row["name"]))})
    if models:
        lines += [
            "",
            head[0].replace("| written", "| model, written"),
            "|---" * (len(versions) + 1) + "|",
        ]
    for model in models:
        for folder in folders:
            rows = [
                r for r in found if model_of(r.row["name"]) == model and r.row["folder"] == folder
            ]
            if rows:
                cells = [_cell(r for r in rows if r.reader == v) for v in versions]
                lines.append(f"| {model}, {folder} | " + " | ".join(cells) + " |")
    wrong = [r for r in found if r.word in ("refused", "failure")]
    lines += [""] if wrong else []
    lines += [
        f"{r.word}: {r.row['folder']} -> {r.reader}: {r.row['name']}: {_reason(r.row)}"
        for r in sorted(wrong, key=lambda r: r.word)
    ]
    return lines


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _cell(rows: Iterable[Reading]) -> str:
    """How many went how: those that compile come first, what there is none of is left out."""
    counts = Counter(r.word for r in rows)
    parts = [f"{counts['compiles']} compile"]
    parts += [f"{counts['refused']} refused by name"] if counts["refused"] else []
    parts += [f"{counts['as at home']} as at home"] if counts["as at home"] else []
    parts += [f"**{counts['failure']} fail**"] if counts["failure"] else []
    return ", ".join(parts) if counts else "-"


def _reason(row: Row) -> str:
    text = " ".join(row.get("text", "").split())
    parts = [row["verdict"], row.get("error", ""), text]
    parts += [f"captured again: {row['again']}"] if row.get("again", "same") != "same" else []
    parts += [f"run: {row['run']}"] if row.get("run", "same") != "same" else []
    return ", ".join(filter(None, parts))


# --- the command line -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if ``table`` has a failure."""
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("write", help="write captures into a folder")
    command.add_argument("directory", type=Path)
    command.add_argument("names", nargs="*")
    command = commands.add_parser("read", help="read captures, and folders of them")
    command.add_argument("paths", type=Path, nargs="+")
    command.add_argument("--json", type=Path, required=True)
    command = commands.add_parser("table", help="hold what versions said against one another")
    command.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    match args.command:
        case "write":
            for name, error in write(args.directory, args.names).items():
                print(f"not written: {name}: {error}")
        case "read":
            _read_into(args.json, captures(args.paths))
        case _:
            said = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
            print(*table(said), sep="\n")
            return int(any(r.word == "failure" for r in readings(said)))
    return 0


def _read_into(file: Path, paths: Sequence[Path]) -> None:
    import torch

    found = {"torch": torch.__version__.partition("+")[0], "rows": list(read(paths))}
    file.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
