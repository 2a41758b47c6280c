"""Hostile capture files: each gives a capture or one error of the package, in little time and memory.

The fuzzers are in ``fuzz_captures.py``; what they and a reading of the code have found is here, made
by hand. ``hostile_checks`` says what must hold of every file.
"""

from __future__ import annotations

import base64
import gc
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import hostile_checks
import pytest
from hostile_files import Entry, Parts, pairs_of_one_hash, repack, unpack, zip_bytes
from hostile_mutator import Mutator, minimize
from hostile_seeds import FEW, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import fresh

import torch_fakeify as tfk
from torch_fakeify.errors import TRUST
from torch_fakeify.records.tensor import ApplyNode, IntNode, RationalNode, SymbolNode
from torch_fakeify.serialization import limits as bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

_M61 = 2**61 - 1
"""Python's modulus of hashes: all its multiples have the hash 0."""


@pytest.fixture(scope="module")
def valid() -> dict[str, bytes]:
    """Valid captures by name."""
    return seeds((*FEW, "duck_shapes", "functorch", "ranks"))


@pytest.fixture(scope="module")
def watch(
    valid: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Generator[hostile_checks.Watch]:
    """Listens to the interpreter; what is imported on first use is so already.

    What other tests have left is kept from the collector, whose time would be counted.
    """
    path = tmp_path_factory.mktemp("valid") / "c.fkf"
    for data in valid.values():
        path.write_bytes(data)
        hostile_checks.warm_up(path, "instantiate")
    gc.collect()
    gc.freeze()
    yield hostile_checks.Watch()
    gc.unfreeze()


@pytest.fixture
def examine(
    watch: hostile_checks.Watch, tmp_path: Path
) -> Callable[[bytes], hostile_checks.Outcome]:
    """What becomes of a file, loaded, shown and instantiated."""
    path = tmp_path / "c.fkf"

    def examine(data: bytes) -> hostile_checks.Outcome:
        path.write_bytes(data)
        return hostile_checks.examine(path, "instantiate", watch)

    return examine


def with_member(data: bytes, text: bytes) -> bytes:
    """A capture with one member more."""
    parts = unpack(data)
    assert parts is not None
    return repack(Parts(parts.manifest, {**parts.members, "x.json": 0}), **{"x.json": text})


def edited(data: bytes, edit: Edit) -> bytes:
    """A capture whose tables and body were changed, with a manifest that fits."""
    parts = unpack(data)
    assert parts is not None
    edit(parts.members["tables.json"], parts.members["capture.json"]["body"])
    return repack(parts)


# --- what was found -------------------------------------------------------------------------------


def _add_expression(tables: dict[str, Any], *rows: list[Any]) -> int:
    """Add nodes, whose arguments count from the first of them, and return the expression."""
    nodes, exprs = tables["nodes"], tables["exprs"]
    first = len(nodes)
    for tag, *fields in rows:
        if tag == "a":
            fields[1] = [first + at for at in fields[1]]
        nodes.append([tag, *fields])
    exprs.append(len(nodes) - 1)
    return len(exprs) - 1


Edit: TypeAlias = "Callable[[dict[str, Any], dict[str, Any]], None]"
"""A change of the tables and the body of a capture."""


def _guard(*rows: list[Any]) -> Edit:
    """Make an expression the only guard."""

    def edit(tables: dict[str, Any], body: dict[str, Any]) -> None:
        body["shape_env"]["guards"] = [{"expr": _add_expression(tables, *rows)}]

    return edit


def _argument(kind: str, items: Callable[[], list[Any]]) -> Edit:
    """Make a set or dictionary the argument of the last node."""

    def edit(tables: dict[str, Any], body: dict[str, Any]) -> None:
        body["graph"]["nodes"][-1]["args"] = [{"type": kind, "items": items()}]

    return edit


def _pairs() -> list[dict[str, Any]]:
    return [{"type": "tuple", "items": [*pair]} for pair in pairs_of_one_hash(20_000)]


def _keys() -> list[Any]:
    return [[key, 0] for key in _pairs()]


def _complex_numbers() -> list[dict[str, Any]]:
    return [{"type": "complex", "real": 1000003.0 * k, "imag": -1.0 * k} for k in range(5000)]


def _numbers_of_one_hash() -> list[int]:
    return [_M61 * k for k in range(2, 20_000)]


def _one_hash_of_nodes(tables: dict[str, Any], body: dict[str, Any]) -> None:
    tables["nodes"] += [["i", number] for number in _numbers_of_one_hash()]


def _one_hash_of_names(tables: dict[str, Any], body: dict[str, Any]) -> None:
    body["shape_env"]["unique_ids"] = _numbers_of_one_hash()


def _long_number(tables: dict[str, Any], body: dict[str, Any]) -> None:
    tables["stacks"] = [[10**3000]]


def _many_dims(tables: dict[str, Any], body: dict[str, Any]) -> None:
    symbols = [["s", f"q{i}", []] for i in range(40)]
    sizes = [
        {
            "expr": _add_expression(tables, *symbols[i : i + 4], ["a", "Add", [0, 1, 2, 3]]),
            "hint": 9,
        }
        for i in range(0, 40, 4)
    ]
    for row in tables["tensors"]:
        row["size"] = row["stride"] = sizes


def _power_of_a_hint(tables: dict[str, Any], body: dict[str, Any]) -> None:
    at = next(i for i, row in enumerate(tables["nodes"]) if row[0] == "s")
    tables["nodes"] += [["i", 10**11], ["a", "Pow", [len(tables["nodes"]), at]]]
    tables["exprs"] += [len(tables["nodes"]) - 2, len(tables["nodes"]) - 1]
    for symbol in body["shape_env"]["symbols"]:
        symbol["hint"] = len(tables["exprs"]) - 2
    body["shape_env"]["guards"] = [{"expr": len(tables["exprs"]) - 1}]


def _doubled_wrappers(tables: dict[str, Any], body: dict[str, Any]) -> None:
    tensors = tables["tensors"]
    wrappers = [row for row in tensors if "subclass" in row]
    steps = [step for row in wrappers for _, step in row["subclass"]["tensors"]]
    steps += [row.get(field, 0) for row in tensors for field in ("base", "grad")]
    step = len(tensors) - 1 - sum(steps)  # to the row before
    for _ in range(60):
        subclass = {**wrappers[0]["subclass"], "tensors": [["a", step], ["b", 0]]}
        row = {**wrappers[0], "id": 1000 + len(tensors), "subclass": subclass}
        tensors.append({**row, **{field: 0 for field in ("storage", "source") if field in row}})
        step = 1


def _transforms(tables: dict[str, Any], body: dict[str, Any]) -> None:
    for row in tables["tensors"]:
        if "functorch" in row:
            stack = row["functorch"]["stack"]
            stack[:] = [{**stack[0], "level": level} for level in range(1, 1001)]


def _other_strides(tables: dict[str, Any], body: dict[str, Any]) -> None:
    rows = tables["tensors"]
    for i, outer in enumerate(rows):
        if "subclass" in outer:
            first = rows[i - len(outer["subclass"]["tensors"])]  # they stand before it
            first["size"], first["stride"] = [6, 2], [2, 1]


def _hint_of_another(tables: dict[str, Any], body: dict[str, Any]) -> None:
    number = _add_expression(tables, ["i", 2**31])
    for row in tables["tensors"]:
        row["size"] = [{"expr": number, "hint": 12} for _ in row["size"]]


SUM = ["s", "q", []], ["i", 7], ["a", "Add", [0, 1]], ["a", "Abs", [2]]
DOUBLED = ["s", "q", []], *(["a", "Add", [i, i]] for i in range(60))
SQUARED = ["i", 10**4000], *(["a", "Mul", [i, i]] for i in range(9))
SHARED = (
    "LimitError: tables.json $.exprs: the expressions are too large with their shared parts written "
    "out; expected at most"
)
TOO_LARGE = "LimitError: an expression has a value that is too large; expected at most 262144 bits"
WIDE = (
    "LimitError: the file has too many JSON integers of 20 digits and more; expected at most 4000"
)
ONE_HASH = "too many keys have one hash; expected at most 64; found "
PRODUCTS = (
    "LimitError: tables.json $.exprs: the products of sums are too large multiplied out; "
    "expected at most"
)
FOUND: dict[str, tuple[str, Edit, str]] = {
    "an expression that doubles sixty times": ("duck_shapes", _guard(*DOUBLED), SHARED),
    "a power of a thousand million": (
        *("duck_shapes", _guard(["i", 5], ["i", 10**9], ["a", "Pow", [0, 1]])),
        TOO_LARGE,
    ),
    "a product that squares nine times": ("duck_shapes", _guard(*SQUARED), TOO_LARGE),
    "a factorial": ("duck_shapes", _guard(["i", 10**9], ["a", "gamma", [0]]), TOO_LARGE),
    "numbers of one hash as nodes": ("duck_shapes", _one_hash_of_nodes, WIDE),
    "numbers of one hash as a set": ("cond", _argument("set", _numbers_of_one_hash), WIDE),
    "numbers of one hash as ids": ("duck_shapes", _one_hash_of_names, WIDE),
    "tuples of one hash as a set": (
        "cond",
        _argument("set", _pairs),
        f"LimitError: .args[0]: {ONE_HASH}20000",
    ),
    "tuples of one hash as keys": (
        "cond",
        _argument("dict", _keys),
        f"LimitError: {ONE_HASH}20000",
    ),
    "complex numbers of one hash": (
        "cond",
        _argument("set", _complex_numbers),
        f"LimitError: {ONE_HASH}",
    ),
    "a product of sixty sums": ("duck_shapes", _guard(*SUM, ["a", "Mul", [3] * 60]), PRODUCTS),
    "a tensor of sums of sizes": ("duck_shapes", _many_dims, PRODUCTS),
    "a power of a recorded size": ("duck_shapes", _power_of_a_hint, TOO_LARGE),
    "wrappers that hold one tensor twice": (
        *("two_tensors", _doubled_wrappers),
        "LimitError: the tensors hold too many others, each counted as often as it is held; "
        "expected at most",
    ),
    "a thousand transforms": (
        *("functorch", _transforms),
        "ConvertError: too many transforms inside one another; expected at most 64; found 1000",
    ),
    "a position of three thousand digits": (
        *("duck_shapes", _long_number),
        "FormatError: tables.json $.stacks[0]: there is no such row of frames yet; "
        "expected a position below ",
    ),
    "a wrapper whose own class refuses it": (
        *("two_tensors", _other_strides),
        "ConvertError: makes no tensor of these parts; "
        "expected what its __tensor_flatten__ gives; found 'a', 'b'",
    ),
    "a size that is not its hint": (
        *("duck_shapes", _hint_of_another),
        "CaptureError: torch cannot rebuild the capture; "
        "found AssertionError: int(sym)=2147483648 ",
    ),
}
"""By what the file has: the capture, the change, the kind of error with a part of its text."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_refused(
    name: str,
    valid: dict[str, bytes],
    examine: Callable[[bytes], hostile_checks.Outcome],
) -> None:
    """Each gives one error that says what is wrong, within the bounds of time and memory."""
    seed, edit, error = FOUND[name]
    kind, _, text = error.partition(": ")
    outcome = examine(edited(valid[seed], edit))
    assert (outcome.word, outcome.kind.partition(" ")[0]) == ("refused", kind), outcome.text
    assert text in outcome.text
    assert len(outcome.text) < hostile_checks.LONGEST


def _dim(number: int) -> Edit:
    """Have the sources of sizes name another dim."""

    def edit(tables: dict[str, Any], body: dict[str, Any]) -> None:
        for row in tables["sources"]:
            if row["cls"] == "TensorPropertySource":
                row["fields"] = [[n, number if n == "idx" else v] for n, v in row["fields"]]

    return edit


def _view_of_less(tables: dict[str, Any], body: dict[str, Any]) -> None:
    for row in tables["tensors"]:
        if "base" in row:
            row["size"] = [-3]


@pytest.mark.parametrize(
    ("stage", "seed", "edit", "text"),
    [
        ("fresh", "duck_shapes", _dim(-1), "the inputs contradict what the graph assumes"),
        ("fresh", "duck_shapes", _dim(7), "torch cannot rebuild the capture"),
        ("materialize", "base_and_view", _view_of_less, "torch cannot rebuild the capture"),
    ],
)
def test_what_torch_raises_of_a_record_is_one_error(
    stage: str,
    seed: str,
    edit: Edit,
    text: str,
    valid: dict[str, bytes],
    watch: hostile_checks.Watch,
    tmp_path: Path,
) -> None:
    """A frame in a new environment, and real inputs, of records that cannot be."""
    path = tmp_path / "c.fkf"
    path.write_bytes(valid[seed])
    hostile_checks.warm_up(path, stage)
    path.write_bytes(edited(valid[seed], edit))
    outcome = hostile_checks.examine(path, stage, watch)
    assert outcome.word == "refused", outcome.text
    assert text in outcome.text


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":', "[[],[],["])
@pytest.mark.parametrize("depth", [399, 100_000])
@pytest.mark.parametrize("closed", [False, True])
def test_depth_takes_no_time(
    opening: str, depth: int, closed: bool, watch: hostile_checks.Watch
) -> None:
    """The measure of depth is linear in the text, also where all of it is one nest; no parser gets it."""
    closing = "".join({"[": "]", "{": "}"}.get(c, "") for c in reversed(opening))
    closing = closing.removeprefix("]][][") or closing
    text = (opening * depth + closing * depth * closed).encode()
    said = "nested deeper than 400 levels" if depth > 399 else None
    with watch.watching(), pytest.raises(tfk.FakeifyError, match=said):
        tfk.loads(text)
    assert not watch.seen


@pytest.mark.parametrize(
    ("member", "limit"),
    [
        (b"[" + b"{}," * 150_000 + b"{}]", "arrays and objects; expected at most "),
        (b"[" + b"1," * 400_000 + b"1]", "values; expected at most "),
    ],
)
def test_a_small_file_cannot_ask_for_many_records(
    member: bytes,
    limit: str,
    valid: dict[str, bytes],
    examine: Callable[[bytes], hostile_checks.Outcome],
    tmp_path: Path,
) -> None:
    """A record takes a hundred times its text: their number is bounded by the file's size."""
    data = with_member(valid["cond"], member)
    outcome = examine(data)
    assert outcome.kind == "LimitError"
    assert f"the file has too many JSON {limit}" in outcome.text
    assert outcome.text.endswith(TRUST)
    path = tmp_path / "trusted.fkf"
    path.write_bytes(data)
    limits = tfk.Limits(ratio=1000, containers_per_byte=1000, values_per_byte=1000)
    assert tfk.Capture.load(path, limits=limits).desc.frame is not None


def test_a_capture_of_a_hundred_megabytes_is_read_when_asked(
    valid: dict[str, bytes], tmp_path: Path
) -> None:
    """The limits of one file can be raised; by default blanks are a bomb."""
    path = tmp_path / "large.fkf"
    path.write_bytes(with_member(valid["cond"], b"0" + b" " * (100 << 20)))
    with pytest.raises(tfk.LimitError, match="a member is too large"):
        tfk.Capture.load(path)
    limits = tfk.Limits(member_bytes=200 << 20, total_bytes=200 << 20)
    with pytest.raises(tfk.LimitError, match="unpacks to far more than its size"):
        tfk.Capture.load(path, limits=limits)
    with pytest.raises(tfk.LimitError, match="a member is too large; expected at most 67108864"):
        tfk.Capture.load(path, limits=tfk.Limits(ratio=2000))
    limits = tfk.Limits(ratio=2000, member_bytes=200 << 20, total_bytes=200 << 20)
    assert tfk.Capture.load(path, limits=limits).desc.frame is not None


_LARGEST = {
    "rows of nodes": ("tables.json", "nodes", b'["i",%d]'),
    "rows of frames": ("tables.json", "frames", b'["%x",1,"",""]'),
    "empty rows": ("tables.json", "stacks", b"[]"),
    "lists": ("capture.json", "args", b'{"type":"list","items":[]}'),
    "numbers": ("capture.json", "args", b"%d"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("what", _LARGEST)
def test_a_large_file_takes_no_more_than_a_small_one(
    what: str, valid: dict[str, bytes], tmp_path: Path
) -> None:
    """Twenty megabytes that ask for as much as a file may, measured in a process of its own."""
    member, field, row = _LARGEST[what]
    parts = unpack(valid["cond"])
    assert parts is not None
    limits = tfk.Limits()
    containers = row.count(b"[") + row.count(b"{")
    count = limits.values // (containers + row.count(b",") + 1)
    count = min(count, limits.containers // max(containers, 1))
    rows = b",".join(row % i if b"%" in row else row for i in range(count - 2000))
    tables, body = parts.members["tables.json"], parts.members["capture.json"]["body"]
    if member == "tables.json":
        tables[field] = ["@"]
        tables.setdefault("frames", []).append(["@blob@", 1, "", ""])
    else:
        body["graph"]["nodes"][-1][field] = ["@"]
        body["frame"] = "@blob@"
    text = json.dumps(parts.members[member], separators=(",", ":")).encode()
    blob = base64.b64encode(random.Random(0).randbytes(15 << 20))
    texts = {member: text.replace(b'"@"', rows).replace(b"@blob@", blob)}
    path = tmp_path / "large.fkf"
    path.write_bytes(repack(parts, **texts))
    assert path.stat().st_size > 15 << 20
    program = (
        "import sys, time; import torch_fakeify as tfk\n"
        "from torch_fakeify.serialization.capture_file import read_capture\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before, start = peak(), time.process_time()\n"
        "try: read_capture(sys.argv[1])\n"
        "except tfk.FormatError as error: print(error, file=sys.stderr)\n"
        "print(peak() - before, time.process_time() - start)"
    )
    done = fresh("-c", program, path)
    assert "too many JSON" not in done.stderr  # it is read as far as that
    kilobytes, seconds = map(float, done.stdout.split())
    assert kilobytes * 1024 < hostile_checks.MEMORY
    assert seconds < 3 * hostile_checks.SECONDS  # 2.2 s at most where this was measured


def test_a_member_cannot_claim_to_be_packed_larger_than_the_file(
    valid: dict[str, bytes], examine: Callable[[bytes], hostile_checks.Outcome]
) -> None:
    """By such a claim the ratio of a bomb would look small."""
    last = Entry(b"capture.json", b"{}" + b" " * (8 << 20), changes={"central_packed": 1 << 20})
    outcome = examine(zip_bytes([Entry(b"manifest.json", b"{}"), last]))
    assert (outcome.kind, outcome.layer) == ("FormatError", "container")
    assert "members overlap with their directory" in outcome.text


# --- the bounds themselves ------------------------------------------------------------------------


def test_trees_are_counted_as_they_are_written_out() -> None:
    """Shared parts count each time, up to one more than is allowed."""
    args = [(), (0, 0), (1, 1), (2,)]
    assert bounds.tree_nodes(args, [3], 100) == 8
    assert bounds.tree_nodes(args, [3, (0, 1, 2), 0], 100) == 8 + 7 + 1
    assert bounds.tree_nodes(args, [3, 3], 10) == 11
    assert bounds.tree_nodes(args, [9, ()], 10) == 0  # refused elsewhere


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        ([SymbolNode("s0", ()), IntNode(3), ApplyNode("Pow", (0, 1))], True),
        ([IntNode(2), SymbolNode("s0", ()), ApplyNode("Pow", (0, 1))], True),
        ([SymbolNode("s0", ()), IntNode(10**6), ApplyNode("Pow", (0, 1))], False),
        ([IntNode(7), IntNode(-(10**6)), ApplyNode("PowByNatural", (0, 1))], False),
        ([IntNode(1), IntNode(10**6), ApplyNode("LShift", (0, 1))], False),
        ([IntNode(5), RationalNode(10**7, 3), ApplyNode("Pow", (0, 1))], False),
        ([IntNode(9), IntNode(8), ApplyNode("Mul", (0, 1)), ApplyNode("Pow", (0, 2))], True),
        ([SymbolNode("s0", ()), ApplyNode("Add", (0,) * 9000)], True),
        ([SymbolNode("s0", ()), ApplyNode("Mul", (0,) * 9000)], False),
        ([IntNode(10**9), ApplyNode("loggamma", (0,))], False),
    ],
)
def test_values_are_bounded_before_they_are_computed(nodes: list[Any], fits: bool) -> None:
    """A power, a factorial, a product: what sizes need fits, and what takes memory does not."""
    if fits:
        bounds.check_numbers(nodes, "$")
        return
    with pytest.raises(tfk.LimitError, match="an expression has a value that is too large"):
        bounds.check_numbers(nodes, "$")


# --- the fuzzers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "examples"), [("instantiate", 200), ("fresh", 60), ("materialize", 60)]
)
def test_hostile_files_are_refused(
    stage: str,
    examples: int,
    valid: dict[str, bytes],
    watch: hostile_checks.Watch,
    tmp_path: Path,
) -> None:
    """A short run of the structure-aware fuzzer, with all that is done with a capture."""
    captures = [valid[name] for name in FEW]
    words: set[str] = set()
    path = tmp_path / "c.fkf"
    for data in captures:
        path.write_bytes(data)
        hostile_checks.warm_up(path, stage)

    @settings(max_examples=examples, database=None)
    @given(st.sampled_from(captures), st.randoms(use_true_random=False))
    def one(data: bytes, choices: random.Random) -> None:
        path.write_bytes(Mutator(choices, captures).mutate(data))
        outcome = hostile_checks.examine(path, stage, watch)
        words.add(outcome.word)
        assert outcome.word != "finding", f"{outcome.kind}\n{outcome.text}"

    one()
    assert words == {"loaded", "refused"}


_EXTREME = (10**400, -(10**400), 2**63, 1e308)
"""Numbers that no float, no int64 or no time in milliseconds holds."""


@pytest.mark.sweep
def test_a_number_of_any_size_stands_anywhere(watch: hostile_checks.Watch, tmp_path: Path) -> None:
    """Each number of a file is replaced, one after another: one place of each field."""
    path = tmp_path / "c.fkf"
    tried: set[tuple[object, ...]] = set()
    words: Counter[str] = Counter()
    for data in seeds((*FEW, "failed", "gone_inferred")).values():
        path.write_bytes(data)
        hostile_checks.warm_up(path, "load")
        parts = unpack(data)
        assert parts is not None
        for box, key, field in _numbers(parts.members, ()):
            if field in tried:
                continue
            tried.add(field)
            before = box[key]
            for box[key] in _EXTREME:
                path.write_bytes(repack(parts))
                outcome = hostile_checks.examine(path, "load", watch)
                words[outcome.word] += 1
                assert outcome.word != "finding", f"{field}: {outcome.kind}\n{outcome.text}"
            box[key] = before
    assert len(tried) > 100, len(tried)
    assert min(words["loaded"], words["refused"]) > 100


def _numbers(tree: Any, field: tuple[object, ...]) -> Iterator[tuple[Any, Any, tuple[object, ...]]]:
    """Yield the box and key of each number, with the path to it where all items of a list are one."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        here = (*field, key if isinstance(tree, dict) else "*")
        if isinstance(tree[key], (dict, list)):
            yield from _numbers(tree[key], here)
        elif isinstance(tree[key], (int, float)) and not isinstance(tree[key], bool):
            yield tree, key, (*field, key)


def test_what_is_left_out_is_not_needed(valid: dict[str, bytes]) -> None:
    """A finding is made small: only what it needs stays."""
    small = minimize(valid["cond"], lambda data: b"cond" in str(unpack(data)).encode())
    assert len(small) < len(valid["cond"]) * 0.6
    assert "cond" in str(unpack(small))
