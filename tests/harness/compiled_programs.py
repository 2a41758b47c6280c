"""Programs that are compiled with and without a handoff: features of torch, modules, models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from observed_values import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from model_zoo import SizedModel
    from observe import Run


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and the settings in which it is compiled and called."""

    dynamo: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Dynamo."""
    functorch: Mapping[str, Any] = field(default_factory=dict)
    """Settings of AOTAutograd."""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of inductor."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What torch is in meanwhile."""
    other_symbols: str = ""
    """Why the inner backend's inputs have other symbols; what depends on them is not compared then."""
    implied_guards: str = ""
    """Why guards on shapes are equivalent, and not the same text."""
    warm: bool = False
    """Whether the program runs once before: the first time, torch compiles parts of itself with it."""

    def do(self, run: Run) -> None:
        """Compile with ``run.compile`` and call with ``run.call``."""
        raise NotImplementedError


# --- features -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Feature(Program):
    """One feature of ``torch.compile``."""

    function: Callable[[Run], None]
    raises: bool = False
    """Whether every call of it raises torch's own error."""
    plain: bool = False
    """Whether plain pytest runs it; else the sweep does."""
    backends: tuple[str, ...] = ("aot_eager",)

    def do(self, run: Run) -> None:
        """Use the feature."""
        self.function(run)


FEATURES: dict[str, Feature] = {}

WITH_INDUCTOR = frozenset({
    "mutated", "overlap_after_disjoint", "metadata_changes_twice", "specialize_on", "checkpointed",
    "random_numbers", "compiled_in_compiled", "donated_buffers", "automatic_unbacked",
    "subclasses_that_are_no_wrappers", "deduplicated", "fullgraph",
})  # fmt: skip
"""Those that the sweep compiles with inductor too: each takes seconds of a C++ compiler."""


def feature(**settings: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter a function in the table of features; the settings are `Feature`'s fields."""

    def enter(function: Callable[[Run], None]) -> Callable[[Run], None]:
        name = function.__name__
        assert name not in FEATURES, name
        assert function.__doc__, name
        if name in WITH_INDUCTOR:
            settings.setdefault("backends", ("aot_eager", "inductor"))
        FEATURES[name] = Feature(function=function, **settings)
        return function

    return enter


# --- modules and functions ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Example(Program):
    """A function or module, compiled once and called several times."""

    make: Callable[[], tuple[Any, ...]]
    """Gives the function or module and the arguments of each call."""
    grad: bool = False
    """Whether each call is followed by a backward."""
    backend: str = "aot_eager"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``torch.compile``."""

    def do(self, run: Run) -> None:
        """Compile and call."""
        with torch.set_grad_enabled(self.grad):
            fn, *calls = self.make()
            of = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "module", None)
            compiled = run.compile(fn, **self.options)
            for args in calls:
                run.call(compiled, *args, of=of or (), grad=self.grad)
                for t in tensors_in((args, [*of.parameters()] if of else ())):
                    t.grad = None


@dataclass(frozen=True, kw_only=True)
class Model(Program):
    """A model, called with inputs of three sizes.

    The first is compiled as it is, the second makes sizes dynamic, the third finds its graph there.
    """

    model: SizedModel
    training: bool
    """With gradients and a backward pass; else without both."""
    dynamic: bool | None = None
    """As for ``torch.compile``; by default a size becomes dynamic when it changes."""

    def do(self, run: Run) -> None:
        """Compile and call."""
        module = self.model.make().train(self.training)
        calls = self.model.calls()
        with torch.no_grad():
            module(**calls[0])  # libraries import modules and ask for versions in their first call
        compiled = run.compile(module, dynamic=self.dynamic)
        for inputs in calls:
            module.zero_grad()
            with torch.set_grad_enabled(self.training):
                run.call(compiled, of=module, grad=self.training, **inputs)
