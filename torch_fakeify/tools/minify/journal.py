"""The journal of a search: the tried candidates, from which an interrupted search resumes."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_BEST = "best "
_HEAD = re.compile(rb"(?:[0-9a-f]{64}\n)?")
"""The first line of a journal; the file is empty if its writer was killed early."""


class Journal:
    """The digests of tried candidates, in a file ``OUTPUT.journal`` that is removed at the end.

    ``head`` identifies the search; the journal of another search is discarded.
    """

    def __init__(self, output: Path, head: Any) -> None:
        self._path = self.path_of(output)
        first = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()
        text = ""
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8", errors="replace")
        is_resumed = text.splitlines()[:1] == [first]
        lines = text.splitlines()[1:] if is_resumed else []
        best = [line for line in lines if line.startswith(_BEST)]
        self._seen = set(lines).difference(best)
        self.best = best[-1].removeprefix(_BEST) if best else None
        """Digest of the best frame of an earlier search."""
        self._file = self._path.open("a" if is_resumed else "w", encoding="utf-8")
        if not is_resumed:
            self._write(first)

    @staticmethod
    def path_of(output: Path) -> Path:
        """The path of the journal of an output."""
        return output.with_name(output.name + ".journal")

    @staticmethod
    def is_journal(path: Path) -> bool:
        """Whether a file is a journal: its first line is a digest."""
        try:
            with path.open("rb") as file:
                return _HEAD.fullmatch(file.readline(80)) is not None
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __contains__(self, digest: str) -> bool:
        return digest in self._seen

    @property
    def count(self) -> int:
        """Number of tried candidates."""
        return len(self._seen)

    def add(self, digest: str) -> None:
        """Add a tried candidate."""
        self._seen.add(digest)
        self._write(digest)

    def set_best(self, digest: str) -> None:
        """Note the best frame so far, which the output contains."""
        self._write(_BEST + digest)

    def remove(self) -> None:
        """Remove the journal of a finished search."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
