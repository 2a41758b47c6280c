"""Fake inputs, backend calls and guards for frontends other than Dynamo.

In the order in which a frontend calls it::

    from torch_fakeify import frontend

    policy = frontend.Policy(named={"x": {0: frontend.Dim(min=2, max=64)}})
    inputs = frontend.describe(scope, policy)  # records, without references to tensors
    trace = frontend.Trace(inputs)  # a new FakeTensorMode with a new ShapeEnv
    with trace:
        gm = make_fx(trace.flat(call, scope))(*trace.inputs)
    run = trace.compile(gm, "inductor")  # a fresh ShapeEnv again; its facts come back
    guards = trace.guards()

    guards.check(scope)  # does the graph hold for these arguments?
    guards.failing(scope)  # the first guard that does not
    run(scope)

A scope is a mapping from names to arguments, such as the locals of a frame or
``inspect.signature(fn).bind(*args, **kwargs).arguments``: tensors, numbers, constants and containers
of them (lists, tuples, dictionaries, modules, classes registered with ``torch.utils._pytree``). Its
name in guards is ``L``. Results may have the same classes.

`Trace.compile` takes any Dynamo backend. Inside `Trace.handoff`, which it uses, AOTAutograd may be
called directly::

    aot = frontend.aot_autograd()
    with trace.handoff(gm) as (graph, inputs):
        fn = aot.aot_module_simplified(graph, inputs, fw_compiler=compiler)

    with trace.handoff(gm) as (graph, inputs), contextlib.ExitStack() as stack:
        joint = aot.aot_export_joint_with_descriptors(stack, graph, tuple(inputs))
        fn = aot.aot_compile_joint_with_descriptors(joint, fw_compiler=..., bw_compiler=...)

Only one thread at a time can trace (``with trace:``) or compile: torch patches global state
meanwhile, so both hold the lock of ``torch.compile``. A traced function must not wait for another
thread that compiles.

A tensor that the function does not get as an argument, such as a global, must be a name of the scope.
The frontend must guard other values that it reads: ``trace.guards() + [Guard(text, holds)]``.
"""

from __future__ import annotations

from torch_fakeify.compat.torch_dynamo import aot_autograd as aot_autograd
from torch_fakeify.guards.conditions import Guard as Guard
from torch_fakeify.guards.guard_list import Guards as Guards

from .policy import Dim as Dim
from .policy import Policy as Policy
from .trace import Inputs as Inputs
from .trace import Trace as Trace
from .trace import describe as describe

__all__ = [
    "Dim",
    "Guard",
    "Guards",
    "Inputs",
    "Policy",
    "Trace",
    "aot_autograd",
    "describe",
]
