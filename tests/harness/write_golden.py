"""Writes the golden corpus: ``python tests/harness/write_golden.py [NAME...]``.

A corpus that is released is never written again: this is for a new format version, and for kinds
that an older release did not have, whose files are named on the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "zoo"))

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import GOLDEN as ROOT

SUMS = ROOT / "SHA256SUMS"


def text_of(name: str, capture: Any) -> str:
    """What stands beside a file: its page, the records unless they are many, and the instance."""
    import golden_text

    parts = [golden_text.page_text(capture)]
    if not name.startswith(("model_", "program_")):
        parts.append(golden_text.record_text(capture))
    instance = capture.instantiate()
    parts.append(golden_text.instance_text(instance, nodes=not name.startswith("model_")))
    return "\n".join(parts)


def document_text(records: Any) -> str:
    """What stands beside a document of a frontend: its guards and policies."""
    from torch_fakeify import frontend

    inputs = frontend.Inputs.from_desc(records["inputs"])
    guards = frontend.Guards.from_desc(records["guards"])
    policies = [frontend.Policy.from_desc(desc) for desc in records["policies"]]
    return "\n".join(
        [*map(str, inputs.guards), "", *map(str, guards), "", *map(repr, policies), ""]
    )


def sums() -> dict[str, str]:
    """The checksum of each file of the corpus, as they are now."""
    files = sorted(path for path in ROOT.iterdir() if path != SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_files(names: set[str]) -> None:
    """Write some captures, or all of them."""
    import torch
    from golden_cases import cases, documents

    import torch_fakeify as tfk

    ROOT.mkdir(parents=True, exist_ok=True)
    if not names:
        for path in ROOT.iterdir():
            path.unlink()
    for name, make in cases().items():
        if not names or name in names:
            torch._dynamo.reset()
            make().save(ROOT / f"{name}.fkf", version=1)
    for name, make in documents().items():
        if not names or name in names:
            (ROOT / f"{name}.json").write_bytes(tfk.dumps(make()))


def write_texts(names: set[str]) -> None:
    """Write the texts of these captures, or of all, and the checksums of everything."""
    import torch_fakeify as tfk

    for path in sorted(ROOT.glob("*.fkf")):
        if not names or path.stem in names:
            text = text_of(path.stem, tfk.Capture.load(path))
            path.with_suffix(".txt").write_text(text, encoding="utf-8")
    for path in sorted(ROOT.glob("*.json")):
        if not names or path.stem in names:
            text = document_text(tfk.loads(path.read_bytes()))
            path.with_suffix(".txt").write_text(text, encoding="utf-8")
    lines = [f"{digest}  {name}\n" for name, digest in sums().items()]
    SUMS.write_text("".join(lines), encoding="utf-8")


def main() -> int:
    """Write what the command line names: captures first, then texts, by readers that are new to them."""
    logging.disable(logging.CRITICAL)
    stage, *names = sys.argv[1:] if sys.argv[1:2] == ["--texts"] else ["--files", *sys.argv[1:]]
    if stage == "--texts":
        write_texts(set(names))
        return 0
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of a set of texts is one of few things that a file has of its process.
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        return subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode
    write_files(set(names))
    child = [sys.executable, sys.argv[0], "--texts", *names]
    return subprocess.run(child, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
