"""Threads, forked children, worker processes, interleaved modes, and tables that must not leak."""

from __future__ import annotations

import gc
import os
import re
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from places import IMPORTABLE
from processes import PACKAGE, fresh
from threads import in_threads
from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.describe.ids import TensorIds
from torch_fakeify.records.id_owners import Numbering
from torch_fakeify.shape_env import tracker

import worker_jobs  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

THREADS = 4


@pytest.fixture
def eager_switching() -> Generator[None]:
    """Threads take turns as often as they can, so that every gap is found."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# --- one describer in several threads -------------------------------------------------------------


class Turnstile:
    """Lets other threads run wherever a table is asked, which the interpreter does seldom."""

    def __init__(self) -> None:
        self.entries: dict[int, Any] = {}

    def get(self, *args: Any) -> Any:
        """As of a dictionary."""
        found = self.entries.get(*args)
        time.sleep(0)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.entries, name)

    def __setitem__(self, key: int, value: Any) -> None:
        self.entries[key] = value
        time.sleep(0)


@pytest.mark.usefixtures("eager_switching")
def test_a_tensor_has_one_number_in_all_threads() -> None:
    """However many threads see it first, and its storage has one, too."""
    describer = tfk.MetaTensorDescriber()
    describer._tensors.entries = Turnstile()  # type: ignore[assignment]
    describer._storages.entries = Turnstile()  # type: ignore[assignment]
    tensors = [torch.empty(n % 7 + 1) for n in range(300)]

    def job(_: int) -> list[Any]:
        return [describer.describe_tensor(t) for t in tensors]

    first, *others = in_threads(job, THREADS)
    assert all(other == first for other in others)
    assert first == job(0)
    assert len({d.id for d in first}) == len(tensors)
    assert len({d.storage.id for d in first}) == len(tensors)


@pytest.mark.usefixtures("eager_switching")
def test_symbolic_sizes_and_environments_have_one_number_in_all_threads() -> None:
    """Two environments never get the same number, nor one of them two."""
    envs = [ShapeEnv() for _ in range(50)]
    sizes = [env.create_unbacked_symint() for env in envs]
    describer = tfk.MetaTensorDescriber()
    describer._syms._envs = Slow()  # type: ignore[assignment]
    fakes: list[Any] = []
    for env, size in zip(envs, sizes, strict=True):
        with FakeTensorMode(shape_env=env):
            fakes.append(torch.empty(size))
    found = in_threads(
        lambda _: [describer.describe_tensor(t).symbols[0].shape_env for t in fakes], THREADS
    )
    assert all(other == found[0] for other in found)
    assert len(set(found[0])) == len(envs)


class Slow(weakref.WeakKeyDictionary[Any, Any]):
    """Lets other threads run between a look and what is made of it."""

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        found = super().get(key, default)
        time.sleep(0)
        return found


@pytest.mark.usefixtures("eager_switching")
def test_ragged_tensors_have_one_number_in_all_threads() -> None:
    """Offsets that differ never get the same number, nor the same offsets two."""
    jagged = [
        torch.nested.nested_tensor([torch.ones(n), torch.ones(2)], layout=torch.jagged)
        for n in range(1, 40)
    ]
    describer = tfk.MetaTensorDescriber()

    class SlowNumbers(dict[int, int]):
        """Lets other threads run before it is told how many there are, and after a look."""

        def __len__(self) -> int:
            """How many there are."""
            time.sleep(0)
            return super().__len__()

        def get(self, *args: Any) -> Any:
            """As of a dictionary."""
            found = super().get(*args)
            time.sleep(0)
            return found

    describer._syms._nested._numbers = SlowNumbers()
    found = in_threads(lambda _: [describer.describe_tensor(t).size[1] for t in jagged], THREADS)
    assert all(other == found[0] for other in found)
    assert len(set(found[0])) == len(jagged)


def test_a_dead_entry_in_the_way_is_no_number() -> None:
    """An entry whose callback never ran does not give its number to what came to its address."""
    numbers = TensorIds(Numbering())
    old, new = torch.empty(1), torch.empty(1)
    number = numbers.of(old)
    entry = numbers.entries.pop(id(old))
    entry.key = id(new)
    numbers.entries[id(new)] = entry
    del old
    numbers.entries[id(new)] = entry
    assert numbers.of(new) != number
    assert numbers.of(new) == numbers.of(new)


# --- threads of their own -------------------------------------------------------------------------


@pytest.mark.usefixtures("eager_switching")
def test_each_thread_has_its_own_describer_and_converter() -> None:
    """Bytes and fake tensors are those of a thread alone, whatever the others do."""
    expected = worker_jobs.describe()
    again = worker_jobs.convert(expected)

    def job(_: int) -> list[bytes]:
        found: list[bytes] = []
        for _ in range(10):
            data = worker_jobs.describe()
            found += [data, worker_jobs.convert(data)]
        return found

    assert in_threads(job, THREADS) == [[expected, again] * 10] * THREADS


def test_the_first_use_of_the_codec_in_many_threads() -> None:
    """How records are written is worked out once, and nobody sees it half done."""
    code = """
        import sys, threading
        sys.setswitchinterval(1e-6)
        from torch_fakeify.records.tensor import MetaStorageDesc, MetaTensorDesc
        from torch_fakeify.serialization.document import dumps, loads
        record = MetaTensorDesc(id=0, dtype="float32", device="cpu", size=(2,), stride=(1,),
                                storage_offset=0, storage=MetaStorageDesc(id=0, nbytes=8))
        start, found = threading.Barrier(8), []
        def job():
            start.wait()
            data = dumps([record])
            found.append((data, loads(data) == (record,) or loads(data) == [record]))
        threads = [threading.Thread(target=job) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 8, found
        assert len(set(found)) == 1 and found[0][1], found
    """
    fresh("-c", textwrap.dedent(code))


@pytest.mark.usefixtures("eager_switching")
def test_checkpoints_of_many_threads() -> None:
    """Each thread's environment goes back to what it was; at the end torch's methods are its own."""
    methods = {name: vars(SymNode)[name] for name in ("__init__", "guard_bool", "maybe_as_int")}

    def job(_: int) -> list[int]:
        left: list[int] = []
        for _ in range(15):
            env = ShapeEnv()
            kept = env.create_unbacked_symint()
            with tfk.checkpoint(env) as checkpoint:
                made = env.create_unbacked_symint()
                checkpoint.rollback()
                left.append(len(env.var_to_range))
                with pytest.raises(tfk.ShapeEnvError):
                    bool(made == 3)
            torch._check(kept > 2)
        return left

    assert in_threads(job, THREADS) == [[1] * 15] * THREADS
    gc.collect()
    assert not tracker._trackers
    assert not tracker._wrapped
    assert {name: vars(SymNode)[name] for name in methods} == methods


def test_the_last_watch_ends_while_another_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may find it then: the methods stay wrapped for the one that begins."""
    gc.collect()  # trackers of tests before this one
    old = [tfk.checkpoint(ShapeEnv())]
    assert len(tracker._trackers) == 1
    ref = weakref.ref

    def collecting(*args: Any) -> Any:
        old.clear()
        return ref(*args)

    env = ShapeEnv()
    with monkeypatch.context() as patch:
        patch.setattr(tracker, "weakref", SimpleNamespace(ref=collecting, WeakSet=weakref.WeakSet))
        checkpoint = tfk.checkpoint(env)
    made = env.create_unbacked_symint()
    checkpoint.rollback()
    with pytest.raises(tfk.ShapeEnvError):
        bool(made == 3)
    checkpoint.commit()
    del checkpoint
    assert not tracker._wrapped


def test_one_recorder_and_handoff_in_many_threads(tmp_path: Path) -> None:
    """Each thread compiles its own function at two sizes, gets what eager gets, and has its file."""
    recorder = tfk.record(tmp_path, inner=tfk.handoff("aot_eager"))

    def job(number: int) -> bool:
        def function(x: torch.Tensor) -> torch.Tensor:
            return (x * (number + 2)).view(-1)[: x.shape[0]] + x.shape[1]

        compiled = torch.compile(function, backend=recorder, dynamic=True)
        inputs = [torch.randn(3, 4), torch.randn(5 + number, 6)]
        return all(torch.equal(compiled(x), function(x)) for x in inputs)

    assert in_threads(job, THREADS) == [True] * THREADS
    torch._dynamo.reset()
    assert len(recorder.paths) == THREADS == len(set(recorder.paths))
    assert [path.name[:3] for path in recorder.paths] == [f"{n:03d}" for n in range(THREADS)]
    assert {tfk.Capture.load(path).desc.frame for path in recorder.paths} == {"function"}


def test_a_key_that_a_thread_hides() -> None:
    """What a functional tensor is, is recorded also where functionalization is switched off."""
    describer = tfk.MetaTensorDescriber()
    describer.describe_tensor(torch.empty(3))  # the layout is known
    to_functional: Any = vars(torch)["_to_functional_tensor"]
    functional = to_functional(torch.empty(3))
    hidden = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(hidden):
        d = describer.describe_tensor(functional)
        plain = describer.describe_tensor(torch.empty(3))
    assert d.functional is not None
    assert plain.functional is None


# --- interleaved modes ----------------------------------------------------------------------------


def test_two_modes_interleaved() -> None:
    """Each converter's fakes are of its mode and environment, and all ids are as they were."""
    describer = tfk.MetaTensorDescriber()
    tensors = [torch.empty(n + 2, 3) for n in range(6)]
    tensors += [t[1:] for t in tensors]
    records = [describer.describe_tensor(t) for t in tensors]
    modes = [FakeTensorMode(shape_env=ShapeEnv()) for _ in range(2)]
    converters = [tfk.MetaConverter(mode) for mode in modes]
    fakes: list[list[Any]] = [[], []]
    for d in records:
        for converter, mode, made in zip(converters, modes, fakes, strict=True):
            with modes[0]:  # whichever mode is active
                made.append(converter.from_desc(d))
            assert made[-1].fake_mode is mode
            sizes = [n for n in made[-1].shape if isinstance(n, torch.SymInt)]
            assert {id(n.node.shape_env) for n in sizes} <= {id(mode.shape_env)}
    one, other = tfk.MetaTensorDescriber(), tfk.MetaTensorDescriber()
    for a, b in zip(*fakes, strict=True):
        assert one.describe_tensor(a) == other.describe_tensor(b)
    both = [describer.describe_tensor(t) for pair in zip(*fakes, strict=True) for t in pair]
    assert len({d.id for d in both} | {d.id for d in records}) == 3 * len(records)
    assert {fact.shape_env for d in both for fact in d.symbols} == {0, 1}
    assert [describer.describe_tensor(t) for t in tensors] == records
    for converter, made in zip(converters, fakes, strict=True):
        assert all(converter.from_desc(d) is t for d, t in zip(records, made, strict=True))


def test_a_fake_that_is_made_again_is_remembered() -> None:
    """The late death of the first one does not make a converter forget the second one."""
    describer = tfk.MetaTensorDescriber()
    converter = tfk.MetaConverter(FakeTensorMode())
    d = describer.describe_tensor(torch.empty(3))
    made: list[Any] = [converter.from_desc(d)]
    # Callbacks come youngest first: this one runs while the converter's own is still to come.
    late = weakref.ref(made[0], lambda _: made.append(converter.from_desc(d)))
    del made[0]
    assert late() is None
    assert converter.from_desc(d) is made[0]


# --- forked children ------------------------------------------------------------------------------


def in_child(job: Callable[[], bytes], seconds: float = 60.0) -> bytes:
    """What a forked child of this process gets, which is killed when it takes too long."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, b"done" + job())
        finally:
            os._exit(0)
    os.close(writer)
    timer = threading.Timer(seconds, os.kill, (pid, 9))
    timer.start()
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    timer.cancel()
    assert said.startswith(b"done"), "the child hangs or died"
    return said[4:]


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")


def test_a_forked_child_goes_on_as_its_parent() -> None:
    """What was described before the fork has its number in both; what comes then, the next one."""
    describer = tfk.MetaTensorDescriber()
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv()))
    tensors = worker_jobs.tensors()
    fakes = [converter.from_desc(describer.describe_tensor(t)) for t in tensors]

    def job() -> bytes:
        more = torch.empty(5, 7)
        records = [describer.describe_tensor(t) for t in (*tensors, more)]
        assert all(converter.from_desc(d) is fake for d, fake in zip(records, fakes, strict=False))
        converter.from_desc(records[-1])
        return tfk.dumps(records)

    assert in_child(job) == job()


@pytest.mark.usefixtures("eager_switching")
def test_a_fork_while_other_threads_describe_and_write() -> None:
    """No child waits for a thread that it does not have, and each finds its tables whole."""
    expected = worker_jobs.describe()
    shared = tfk.MetaTensorDescriber()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            worker_jobs.convert(worker_jobs.describe())
            shared.describe_tensor(torch.empty(2))
            with tfk.checkpoint(ShapeEnv()):
                pass

    def job() -> bytes:
        shared.describe_tensor(torch.empty(2))
        with tfk.checkpoint(ShapeEnv()):
            pass
        return worker_jobs.describe()

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert [in_child(job) for _ in range(10)] == [expected] * 10
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def test_a_fork_waits_for_what_the_process_shares() -> None:
    """A lock that another thread holds is free in the child, and what it guards is whole."""
    held, go = threading.Event(), threading.Event()
    state: list[str] = []

    def work() -> None:
        with tracker._changing:
            state.append("half")
            held.set()
            go.wait(0.2)
            state.append("whole")

    worker = threading.Thread(target=work)
    worker.start()
    held.wait()

    def job() -> bytes:
        with tracker._changing:
            return " ".join(state).encode()

    assert in_child(job) == b"half whole"
    worker.join()


# --- worker processes of torch.compile ------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("kind", list(SubprocKind))
def test_in_compile_workers(kind: SubprocKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of inductor describe and convert as this process does, to the byte."""
    paths = [PACKAGE, *IMPORTABLE]
    monkeypatch.setattr(sys, "path", [*paths, *sys.path])
    expected = worker_jobs.describe()
    again = worker_jobs.convert(expected)
    pool = SubprocPool(2, kind=kind)
    try:
        described = [pool.submit(worker_jobs.describe) for _ in range(4)]
        converted = [pool.submit(worker_jobs.convert, expected) for _ in range(4)]
        assert {future.result(100) for future in described} == {expected}
        assert {future.result(100) for future in converted} == {again}
    finally:
        pool.shutdown()


# --- tables ---------------------------------------------------------------------------------------


def held() -> int:
    """Bytes of memory that this process has to itself."""
    gc.collect()
    (number,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(number)


def counts(few: int, many: int) -> Callable[[Any], Any]:
    """How many tensors there are in the plain suite, and in the sweep."""
    params = [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.sweep)]
    reason = "reads its memory from /proc, which this system lacks"
    there = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason=reason)
    return lambda test: there(pytest.mark.parametrize("count", params)(test))


def tensors(count: int) -> Generator[torch.Tensor]:
    """Tensors of many sizes, some of them views."""
    for n in range(count):
        t = torch.empty(n % 61 + 1, n % 67 + 1)
        yield t.t() if n % 4 == 0 else t


@counts(20_000, 200_000)
def test_short_lived_tensors_leave_nothing(count: int) -> None:
    """One describer describes them all; numbers are never given twice, tables do not grow."""
    describer = tfk.MetaTensorDescriber()

    def describe(count: int) -> int:
        last = -1
        for t in tensors(count):
            number = describer.describe_tensor(t).id
            assert number > last
            last = number
        return last

    describe(8_000)
    before = held()
    assert describe(count) >= count
    assert len(describer._tensors.entries) <= 1
    assert len(describer._storages.entries) <= 1
    assert held() - before < 4 << 20


@counts(5_000, 50_000)
def test_short_lived_fake_tensors_leave_nothing(count: int) -> None:
    """One converter makes a fake tensor of each record; both forget it with the tensor."""
    describer = tfk.MetaTensorDescriber()
    converter = tfk.MetaConverter(FakeTensorMode())

    def convert(count: int) -> None:
        for t in tensors(count):
            fake = converter.from_desc(describer.describe_tensor(t))
            describer.describe_tensor(fake)

    convert(2_000)
    before = held()
    convert(count)
    assert len(describer._tensors.entries) <= 2
    assert len(converter._tensors) <= 2
    assert len(converter._storages.entries) <= 1
    assert held() - before < 4 << 20


def test_addresses_that_come_again_are_other_tensors() -> None:
    """Python gives a new tensor the address of a dead one; it gets a number of its own."""
    describer = tfk.MetaTensorDescriber()
    seen: dict[int, int] = {}
    came_again = 0
    for _ in range(500):
        t = torch.empty(3)
        number = describer.describe_tensor(t).id
        came_again += id(t) in seen
        assert number not in seen.values()
        seen[id(t)] = number
        del t
    assert came_again > 100
