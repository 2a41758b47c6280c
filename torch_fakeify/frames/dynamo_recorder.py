"""Record every frame for which Dynamo calls a backend in this process.

The hook is where Dynamo calls a backend, ``OutputGraph._call_user_compiler`` of torch 2.13, so it
covers ``torch.compile`` with a name, a callable, a mode or options, ``nn.Module.compile``, a stance,
export and compiled autograd. During that call the output graph's ``compiler_fn`` is a proxy of the
backend; the keys of Dynamo's caches and guards still use the backend itself.

For ``aot_compile`` and ``torch.export`` Dynamo only captures the graph, so the frame is recorded as *not
compiled*.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify.compat import torch_dynamo

from .record_backend import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_fakeify.compat.backends import Compiled, Compiler

_CAPTURING = ("torch._dynamo.convert_frame", "torch._dynamo.eval_frame")
"""Modules of torch whose functions are used as a backend that only captures."""


class DynamoRecorder(Recorder):
    """A recorder that is called with the backend of each frame."""

    def state_after(self, compiler_fn: Compiler, /) -> Literal["compiled", "not compiled"]:
        """The state of a frame after its backend returned."""
        return "not compiled" if only_captures(compiler_fn) else "compiled"


def only_captures(compiler_fn: Any) -> bool:
    """Whether a compiler function is Dynamo's own for capturing a graph."""
    return getattr(compiler_fn, "__module__", "") in _CAPTURING


class _RecordingProxy:
    """Proxy of a backend that records the call and forwards attributes."""

    def __init__(self, recorder: Recorder, compiler_fn: Compiler) -> None:
        self._recorder = recorder
        self._compiler_fn = compiler_fn
        self.__module__ = getattr(compiler_fn, "__module__", "")

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return self._recorder.call(self._compiler_fn, gm, example_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler_fn, name)


class _Hook:
    """The recorders of this process, and the functions of torch that call them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorders: tuple[Recorder, ...] = ()
        self._restore: Callable[[], None] | None = None

    def add(self, recorder: Recorder) -> None:
        with self._lock:
            if self._restore is None:
                self._restore = self._install()
            self._recorders = (*self._recorders, recorder)

    def remove(self, recorder: Recorder) -> None:
        with self._lock:
            self._recorders = tuple(other for other in self._recorders if other is not recorder)
            if not self._recorders and self._restore is not None:
                self._restore()
                self._restore = None

    def _install(self) -> Callable[[], None]:
        """Replace torch's functions; return the function that puts them back."""
        module: Any = torch_dynamo.dynamo().output_graph
        owner = module.OutputGraph
        call, find_override = owner._call_user_compiler, module.get_backend_override_for_compile_id

        def recorded_call(output_graph: Any, gm: Any, example_inputs: Any) -> Any:
            compiler_fn = output_graph.compiler_fn
            output_graph.compiler_fn = self._recorded(compiler_fn)
            try:
                return call(output_graph, gm, example_inputs)
            finally:
                output_graph.compiler_fn = compiler_fn

        def recorded_override(*args: Any) -> Any:
            compiler_fn = find_override(*args)
            return None if compiler_fn is None else self._recorded(compiler_fn)

        def restore() -> None:
            owner._call_user_compiler = call
            module.get_backend_override_for_compile_id = find_override

        owner._call_user_compiler = recorded_call
        module.get_backend_override_for_compile_id = recorded_override
        return restore

    def _recorded(self, compiler_fn: Compiler) -> Compiler:
        for recorder in self._recorders:
            compiler_fn = _RecordingProxy(recorder, compiler_fn)
        return compiler_fn


_HOOK = _Hook()


def start_recording(recorder: Recorder) -> None:
    """Record every frame for which Dynamo calls a backend from now on, in any thread."""
    _HOOK.add(recorder)


def stop_recording(recorder: Recorder) -> None:
    """Record no more frames; torch's functions are put back after the last recorder."""
    _HOOK.remove(recorder)
