"""Run a frame at batches of sizes, each batch in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.errors import CaptureError
from torch_fakeify.render.text import class_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.tools.worker.fork_server import ForkServer
    from torch_fakeify.tools.worker.replies import Answer, Here

BATCH = 20
"""Most sizes that a process runs."""


def extent(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return what is compared to find the smallest sizes: their sum, then each."""
    return sum(sizes.values()), *sizes.values()


class SizeRuns:
    """Asks processes to run a frame at some sizes, and notes what they ran with.

    Args:
        server: starts the processes.
        path: of the capture.
        request: what they are asked besides the sizes.
        timeout: seconds for each batch.
        memory: bytes that a process may hold; ``None`` for no limit.
        where: names the frame, for errors.
    """

    def __init__(
        self,
        server: ForkServer,
        path: Path,
        request: Mapping[str, Any],
        *,
        timeout: float,
        memory: int | None,
        where: str,
    ) -> None:
        self._server = server
        self._request = {"file": str(path.absolute()), **request}
        self.timeout = timeout
        self._memory = memory
        self._where = where
        self.torch: str | None = None
        """The version of torch, as of the first reply."""
        self.here: Here | None = None

    def ask(self, batch: Sequence[Mapping[str, int]], **more: Any) -> Answer:
        """Run a batch of sizes; ``more`` is added to the request, or replaces parts of it."""
        request = {**self._request, **more, "sizes": list(batch)}
        answer = self._server.ask(request, timeout=self.timeout, memory=self._memory)
        self.torch = self.torch or answer.torch
        self.here = answer.here or self.here
        return answer

    def cannot_run(self, kind: str, message: str) -> CaptureError:
        """Make the error for a frame that runs at no sizes."""
        return CaptureError(
            "the frame cannot be run", where=self._where, found=f"{class_text(kind)}: {message}"
        )
