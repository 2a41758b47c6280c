"""Record every frame for which Dynamo calls a backend in this process.

The hook is where Dynamo calls a backend, ``OutputGraph._call_user_compiler`` of torch 2.13, so it
covers ``torch.compile`` with a name, a callable, a mode or options, ``nn.Module.compile``, a stance,
export and compiled autograd. During that call the output graph's ``compiler_fn`` is a proxy of the
backend; the keys of Dynamo's caches and guards still use the backend itself.

For ``aot_compile`` and ``torch.export`` Dynamo only captures the graph, so the frame is recorded as *not
compiled*.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify.compat import backends, torch_dynamo
from torch_fakeify.compat.backends import Compiled, Compiler, compiler_of
from torch_fakeify.frames.record_backend import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torch_fakeify.frames.notes import FrameReport, Notes

__all__ = ["ScriptRecorder", "start_recording"]

_CAPTURING = ("torch._dynamo.convert_frame", "torch._dynamo.eval_frame")
"""Modules of torch whose functions are used as a backend that only captures."""


class ScriptRecorder(Recorder):
    """A recorder that also writes notes on each frame.

    Args:
        directory: where the files go.
        backend: compiles every frame instead of the script's own backend, inductor with the
            script's ``mode`` and ``options``.
        notes: file of the notes.
        options: as for `Recorder`.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version.
        CaptureError: no backend has that name.
    """

    def __init__(
        self, directory: str, *, backend: str | None = None, notes: Notes, **options: Any
    ) -> None:
        if backend is not None:
            backends.resolve_backend(backend)
        super().__init__(directory, **options)
        self.backend = backend
        self.notes = notes

    def call(
        self,
        compiler_fn: Compiler,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> Compiled:
        """Record one frame and compile it with the script's backend or its replacement."""
        if self.backend is not None and not _only_captures(compiler_fn):
            compiler_fn = compiler_of(self.backend, _settings(compiler_fn))
        return super().call(compiler_fn, gm, example_inputs, **kwargs)

    def state_after(self, compiler_fn: Compiler, /) -> Literal["compiled", "not compiled"]:
        """The state of a frame after its backend returned."""
        return "not compiled" if _only_captures(compiler_fn) else "compiled"

    def note(self, report: FrameReport) -> None:
        """Write a note for the parent process."""
        self.notes.frame(report)

    def warn(self, text: str) -> None:
        """Print to standard error: the script's warning filters do not apply."""
        sys.stderr.write(f"torch-fakeify: warning: {text}\n")
        sys.stderr.flush()


def _only_captures(compiler_fn: Any) -> bool:
    """Whether a compiler function is Dynamo's own for capturing a graph."""
    return getattr(compiler_fn, "__module__", "") in _CAPTURING


def _settings(compiler_fn: Any) -> dict[str, Any]:
    """The script's ``mode`` and ``options``, read from Dynamo's wrapper of the backend."""
    wrapped = getattr(compiler_fn, "_torchdynamo_orig_backend", compiler_fn)
    inductor, other = backends.compile_wrappers()
    if isinstance(wrapped, inductor):
        return {"options": dict(wrapped.config)} if wrapped.config else {}
    return dict(wrapped.kwargs) if isinstance(wrapped, other) else {}


class _RecordingProxy:
    """Proxy of a backend that records the call and forwards attributes."""

    def __init__(self, recorder: ScriptRecorder, compiler_fn: Compiler) -> None:
        self._recorder = recorder
        self._compiler_fn = compiler_fn

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return self._recorder.call(self._compiler_fn, gm, example_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler_fn, name)


def start_recording(recorder: ScriptRecorder) -> None:
    """Record every frame for which Dynamo calls a backend from now on."""
    module: Any = torch_dynamo.dynamo().output_graph
    owner = module.OutputGraph
    call, find_override = owner._call_user_compiler, module.get_backend_override_for_compile_id

    def recorded_call(output_graph: Any, gm: Any, example_inputs: Any) -> Any:
        compiler_fn = output_graph.compiler_fn
        output_graph.compiler_fn = _RecordingProxy(recorder, compiler_fn)
        try:
            return call(output_graph, gm, example_inputs)
        finally:
            output_graph.compiler_fn = compiler_fn

    def recorded_override(*args: Any) -> Any:
        compiler_fn = find_override(*args)
        return None if compiler_fn is None else _RecordingProxy(recorder, compiler_fn)

    owner._call_user_compiler = recorded_call
    module.get_backend_override_for_compile_id = recorded_override
