"""The worker program with one interpreter for all tests: ``python warm_main.py``, see `warm_workers`.

Each forked child first gets the environment and the import path of its request, which a new interpreter
would have been started with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch._dynamo.backends import registry

from torch_fakeify.tools.worker import main as worker

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN = {os.path.realpath(path) for path in os.environ["PYTHONPATH"].split(os.pathsep)}
_LIBRARY = [path for path in sys.path if os.path.realpath(path) not in _OWN]
_run = worker.main


def _main(argv: Sequence[str]) -> int:
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *_LIBRARY]
    registry._discover_entrypoint_backends.cache_clear()
    registry._discover_entrypoint_backends()
    return _run(argv)


worker.main = _main
sys.exit(worker.serve())
