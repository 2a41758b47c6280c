"""Hostile capture files, made from valid ones: the mutator of both fuzzers.

All choices come from one `random.Random`, which may be hypothesis' own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

from hostile_files import Entry, deflate, entries_of, repack, text_of, unpack, zip_bytes

from torch_fakeify.encoding import exprs
from torch_fakeify.records.tensor import Value

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

_VALUES = [cls for cls in get_args(Value) if hasattr(cls, "__struct_config__")]

CANARY = "torch_fakeify.canary"
"""The audit event that code from a file raises."""

_CODE = (
    f"__import__('sys').audit('{CANARY}')",
    f"x);__import__('sys').audit('{CANARY}');(x",
    f"'+__import__('sys').audit('{CANARY}')+'",
    f"\n    __import__('sys').audit('{CANARY}')\n",
    f"a = __import__('sys').audit('{CANARY}')",
    f"${{__import__('sys').audit('{CANARY}')}}{{__import__('sys').audit('{CANARY}')}}",
)

_NAMES = (
    *("os.system", "builtins.eval", "builtins.exec", "builtins.__import__", "builtins.getattr"),
    *("torch.load", "torch.save", "torch.hub.load", "torch.ops.load_library", "torch.compile"),
    *("torch.utils.cpp_extension.load", "torch.utils.data.DataLoader", "operator.methodcaller"),
    *("aten.add.Tensor", "aten.add", "prims.add.default", "cond", "torch.sin", "operator.add"),
    *("operator.getitem", "torch.Tensor.add", "torch.Size", "torch.nn.Parameter", "builtins.int"),
    *("torch.return_types.max", "torch.nn.attention.SDPBackend", "enum.Enum", "builtins.type"),
    *("__class__", "__init__", "__dict__", "forward", "graph", "_modules", "training"),
    *("self", "to"),
    *("torch.testing._internal.two_tensor.TwoTensor", "torch.distributed.tensor.DTensor"),
    *("torch.nested._internal.nested_tensor.NestedTensor", "torch.Tensor", "TreeSpec", "shared"),
    *("NodeSource", "DeviceMesh", "LocalSource", "GetItemSource", "TensorPropertySource"),
    *("class", "lambda", "None", "s0", "u0", "L['x']", "a.b.c", "a..b", "0", "-", "*args", "..."),
)

_WORDS = (
    *("float32", "int64", "bfloat16", "complex64", "bits8", "quint8", "float8_e4m3fn", "any"),
    *("cpu", "cuda:0", "cuda:99999999999", "meta", "xpu", "privateuseone:3", "cpu:-1", "lazy"),
    *("strided", "sparse_coo", "sparse_csr", "sparse_bsr", "_mkldnn"),
    *("jagged", "contiguous_format"),
    *("inf", "-inf", "nan", "DYNAMIC", "DUCK", "UNBACKED", "INFER_STRIDE", "STATIC", "stateless"),
    *("vmap", "grad", "jvp", "functionalize", "batched", "functional"),
    *("DEFAULT", "MULTI_OUTPUT_NODE"),
    *("", "\0", "\x1b[2J\x1b]0;x\x07", "<script>alert(1)</script>", "\u202e\u2028", "a" * 5000),
    *("../../../tmp/x", "/etc/passwd", "%s%n{0.__class__}", "\\", "\n\r\n", "ß" * 300),
)

_INTEGERS = (
    *(-1, 0, 1, 2, 3, 7, 63, 64, 65, 127, 255, 1000, 65536, -2, -(2**31), 2**31 - 1, 2**31, 2**32),
    *(10**9, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1),
    *(10**12, 10**30),
    *(2**500, -(2**4000), 10**4000),
)

_REALS = (0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, 1e20)

_RAW = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1E400", b"01", b"+1"),
    *(b".5", b"'a'"),
    *(b'"\xff\xfe"', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b'"a'),
    *(b'"\\u0000"', b'"\x01"', b"9" * 4000, b"-" + b"9" * 30000, b"1" + b"0" * 300, b""),
    *(b",", b"]"),
    *(b"[" * 300 + b"]" * 300, b"[" * 100000, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    *(b'{"type":"tuple","items":[' * 120 + b"]}" * 120, b'{"a":1,"a":2}', b"/*x*/1", b"tru"),
    *(b'{"type":"record","name":"CaptureDesc","body":{}}', b'{"type":"float","text":"nan"}'),
)

_FUNCTIONS = (*exprs.HEADS, exprs._SINGLETON_INT, "eval")

_CONTAINERS = ("tuple", "list", "size", "set", "dict")

_TAGS = (*(str(cls.__struct_config__.tag) for cls in _VALUES), "record", "no_such_tag")


# --- the mutator ------------------------------------------------------------------------------------


class Mutator:
    """Changes a capture file in one to six places.

    Args:
        random: makes every choice.
        others: captures to take pieces from.
    """

    def __init__(self, random: random.Random, others: Sequence[bytes] = ()) -> None:
        self.random = random
        self.others = others
        self._raw: list[bytes] = []

    def mutate(self, data: bytes) -> bytes:
        """A changed file."""
        parts = unpack(data)
        if parts is None or self._one_in(40):
            return self._flip(data)
        self._raw = []
        for _ in range(self.random.choice((1, 1, 1, 2, 2, 3, 6))):
            if self._one_in(30):
                self._change(parts.manifest)
            else:
                name = "tables.json" if self.random.randrange(100) < 55 else "capture.json"
                tree = parts.members.get(name)
                if isinstance(tree, dict):
                    self._change(tree)
        texts = {name: self._with_raw(text_of(tree)) for name, tree in parts.members.items()}
        entries = entries_of(parts.manifest, texts)
        entries[0].data = self._with_raw(entries[0].data)
        if self._one_in(8):
            return self._damage(entries)
        return zip_bytes(entries)

    # --- JSON ---

    def _change(self, tree: dict[str, Any]) -> None:
        changes: list[Callable[[dict[str, Any]], None]] = [
            *(self._replace,) * 6,
            *(self._nudge,) * 5,
            *(self._splice,) * 4,
            *(self._swap,) * 3,
            *(self._drop,) * 3,
            *(self._repeat,) * 2,
            *(self._expression,) * 4,
            *(self._retag,) * 2,
            *(self._wrap, self._rename),
        ]
        self.random.choice(changes)(tree)

    def _place(self, tree: Any, wanted: Callable[[Any, Any], bool] | None = None) -> Any:
        """A container and a key in it, any of those that fit; ``None`` where there is none."""
        places = [
            (box, key) for box, key in _places(tree) if wanted is None or wanted(box, box[key])
        ]
        return self.random.choice(places) if places else None

    def _replace(self, tree: Any) -> None:
        place = self._place(tree)
        if place is not None:
            place[0][place[1]] = self._value(place[0][place[1]])

    def _value(self, old: Any) -> Any:
        """A hostile value, mostly of the old one's type."""
        kind = self.random.randrange(20)
        if isinstance(old, bool) and kind < 15:
            return not old
        if isinstance(old, (int, float)) and kind < 15:
            return self.random.choice(_INTEGERS)
        if isinstance(old, str) and kind < 16:
            return self.random.choice(self.random.choice((_NAMES, _WORDS, _NAMES, _CODE)))
        if kind == 19:
            return self._token(self.random.choice(_RAW))
        choices: tuple[Any, ...] = (
            *(None, True, False, [], {}, [0], [[]], "x", -1, 2**70),
            *(self.random.choice(_REALS), self.random.choice(_WORDS), self.random.choice(_NAMES)),
            {"type": self.random.choice(_TAGS), "items": [], "data": None},
            {"expr": self.random.randrange(20), "hint": self.random.choice(_INTEGERS)},
            {"type": "tuple", "items": [{"type": "tensor", "tensor": self.random.randrange(9)}]},
            {"type": "function", "kind": "function", "name": self.random.choice(_NAMES)},
        )
        return self.random.choice(choices)

    def _nudge(self, tree: Any) -> None:
        """A number near to another: ids, positions and sizes that are swapped or dangle."""
        place = self._place(tree, lambda _, value: type(value) is int)
        if place is not None:
            box, key = place
            box[key] = self.random.choice(
                (box[key] + 1, box[key] - 1, -box[key], box[key] * 2, self.random.randrange(30))
            )

    def _splice(self, tree: Any) -> None:
        """What stands under the same key elsewhere, in this file or another."""
        source = tree
        if self.others and self._one_in(3):
            other = unpack(self.random.choice(self.others))
            source = None if other is None else other.members.get("tables.json")
            if other is not None and self._one_in(2):
                source = other.members.get("capture.json")
        place = self._place(tree, lambda box, _: isinstance(box, dict))
        if place is None:
            return
        box, key = place
        found = [there[k] for there, k in _places(source) if isinstance(there, dict) and k == key]
        if found:
            box[key] = json.loads(json.dumps(self.random.choice(found)))
        if self._one_in(3):
            twin = self._place(tree, lambda _, value: type(value) is type(box[key]))
            if twin is not None:
                box[key] = json.loads(json.dumps(twin[0][twin[1]]))

    def _swap(self, tree: Any) -> None:
        lists = [box[key] for box, key in _places(tree) if isinstance(box[key], list)]
        lists = [items for items in lists if len(items) > 1]
        if lists:
            items = self.random.choice(lists)
            i, j = self.random.randrange(len(items)), self.random.randrange(len(items))
            items[i], items[j] = items[j], items[i]

    def _drop(self, tree: Any) -> None:
        place = self._place(tree)
        if place is not None:
            del place[0][place[1]]

    def _repeat(self, tree: Any) -> None:
        place = self._place(tree, lambda _, value: isinstance(value, list) and len(value) > 0)
        if place is None:
            return
        items = place[0][place[1]]
        item = self.random.choice(items)
        times = self.random.choice((1, 1, 2, 70, 2000))
        items.extend([item] * times)

    def _retag(self, tree: Any) -> None:
        place = self._place(tree, lambda box, value: isinstance(value, dict) and "type" in value)
        if place is not None:
            place[0][place[1]]["type"] = self.random.choice(_TAGS)

    def _wrap(self, tree: Any) -> None:
        """Deep inside of lists, or of values that hold values."""
        place = self._place(tree)
        if place is None:
            return
        box, key = place
        value, depth = box[key], self.random.choice((1, 2, 30, 63, 66, 99, 101, 140))
        kind = self.random.choice((*_CONTAINERS, None))
        for _ in range(depth):
            value = [value] if kind is None else {"type": kind, "items": [value]}
        box[key] = value

    def _rename(self, tree: Any) -> None:
        place = self._place(tree, lambda box, _: isinstance(box, dict))
        if place is not None:
            box, key = place
            other = self._place(tree, lambda there, _: isinstance(there, dict))
            new = self.random.choice((other[1], "no_such_field", "", "__class__"))
            box[new] = box[key] if self._one_in(2) else box.pop(key)

    def _expression(self, tree: Any) -> None:
        """An expression that is large, deep, shared or not what its place is for."""
        rows, exprs = tree.get("nodes"), tree.get("exprs")
        if not (isinstance(rows, list) and isinstance(exprs, list)):
            place = self._place(tree, lambda _, v: isinstance(v, dict) and "expr" in v)
            if place is not None:
                place[0][place[1]]["expr"] = self.random.randrange(20)
            return
        for _ in range(self.random.choice((1, 1, 2, 3, 8))):
            self._grow(rows)
        if exprs and rows:
            exprs[self.random.randrange(len(exprs))] = len(rows) - 1

    def _grow(self, rows: list[Any]) -> None:
        pick = self.random.randrange
        count = len(rows)
        match pick(8):
            case 0:
                rows.append(["i", self.random.choice(_INTEGERS)])
            case 1:
                rows.append(["f", self.random.choice((0, 1, 3, 2**53 - 1)), pick(2000) - 1000, 53])
            case 2:
                rows.append(
                    ["q", self.random.choice((1, -1, 3, 10**30)), self.random.choice((2, 7))]
                )
            case 3:
                rows.append(["c", self.random.choice(("true", "oo", "int_oo", "nan", "zoo", "I"))])
            case 4:  # each row twice the one before, written out
                times = self.random.choice((3, 30, 60))
                name = self.random.choice(("Add", "Mul", "Pow", "PowByNatural", "Max", "LShift"))
                rows.extend(
                    ["a", name, [count - 1 + i, max(count - 2 + i, 0)]] for i in range(times)
                )
            case 5:  # a tower
                name = self.random.choice(_FUNCTIONS)
                times = self.random.choice((2, 20, 300))
                rows.extend(["a", name, [max(count - 1 + i, 0)]] for i in range(times))
            case 6:
                assumptions = [["integer", True], [self.random.choice(("zero", "negative")), True]]
                rows.append(["s", self.random.choice((*_NAMES, *_CODE)), assumptions])
            case _:
                arity = self.random.choice((1, 2, 2, 2, 3))
                args = [pick(count) if count else 0 for _ in range(arity)]
                rows.append(["a", self.random.choice(_FUNCTIONS), args])

    def _token(self, raw: bytes) -> str:
        """A string that stands for bytes that no JSON writer writes."""
        self._raw.append(raw)
        return f"@raw{len(self._raw) - 1}@"

    def _with_raw(self, text: bytes) -> bytes:
        for i, raw in enumerate(self._raw):
            text = text.replace(b'"@raw%d@"' % i, raw)
        return text

    # --- the ZIP ---

    def _damage(self, entries: list[Entry]) -> bytes:
        random = self.random
        at = random.randrange(len(entries))
        entry, end = entries[at], {}
        match random.randrange(14):
            case 0:
                entries.insert(random.randrange(len(entries) + 1), entry)
            case 1:
                entry.name = random.choice((
                    *(b"../x.json", b"/tmp/x.json", b"a/../b.json", b"C:\\x.json", b"x.json\0.exe"),
                    *(b"", b"\xff.json", b"manifest.json", b"X.JSON", b"a" * 300 + b".json"),
                    *(b"data.safetensors", b"con.json", b"./capture.json", b"capture.json/"),
                ))  # fmt: skip
            case 2:
                entry.mode = random.choice((0o120777, 0o040755, 0o060644, 0o020644, 0o010644, 0))
            case 3:
                where = random.choice(("local", "central"))
                which = random.choice(("crc", "size", "packed"))
                entry.changes[f"{where}_{which}"] = random.choice((1, -1, 1 << 31, 1 << 20))
            case 4:
                entry.flags = random.choice((1, 4, 8, 0x20, 0x40, 0x800, 0x2000, 0xFFFF))
            case 5:
                entry.method = random.choice((0, 1, 6, 9, 12, 14, 93, 95, 99, 65535))
            case 6:  # a bomb: blanks that JSON allows anywhere, and the size that they have
                entry.data += b" " * random.choice((1 << 16, 1 << 20, 3 << 20))
            case 7:  # a bomb that says it is small
                entry.packed = deflate(entry.data + bytes(random.choice((100, 1 << 20))))
            case 8:
                entry.changes["central_offset"] = random.choice((-1, 1, 30, 1 << 31, -(1 << 10)))
            case 9:
                end["count"] = random.choice((-1, 1, 100, 65000))
            case 10:
                end["after"] = random.choice((b"\0", b"PK\5\6" + bytes(18), bytes(1000)))
            case 11:
                end["before"] = random.choice((b"\0", b"#!/bin/sh\n", b"PK\3\4"))
            case 12:
                del entries[at]
            case _:
                entries.extend(
                    [Entry(b"x%d.json" % i, b"{}") for i in range(random.choice((1, 70)))]
                )
        return zip_bytes(entries, **end)

    def _flip(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self.random.choice((1, 1, 4, 30))):
            if out:
                out[self.random.randrange(len(out))] = self.random.randrange(256)
        if self._one_in(4):
            del out[self.random.randrange(len(out) + 1) :]
        return bytes(out)

    def _one_in(self, n: int) -> bool:
        return self.random.randrange(n) == 0


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a tree of JSON."""
    stack = [tree]
    while stack:
        box = stack.pop()
        keys = box if isinstance(box, dict) else range(len(box)) if isinstance(box, list) else ()
        for key in keys:
            yield box, key
            if isinstance(box[key], (dict, list)):
                stack.append(box[key])


# --- making a finding small -------------------------------------------------------------------------


def minimize(data: bytes, still: Callable[[bytes], bool], tries: int = 400) -> bytes:
    """The smallest file found of which ``still`` holds: parts are left out one after another."""
    parts = unpack(data)
    if parts is None or not still(repack(parts)):
        return data
    best = data
    for name in list(parts.members):
        tree = parts.members[name]
        for box, key in sorted(_places(tree), key=lambda place: -len(text_of(place[0][place[1]]))):
            if tries <= 0:
                return best
            if (key not in box) if isinstance(box, dict) else key >= len(box):
                continue
            tries -= 1
            old = box[key]
            if isinstance(box, dict):
                items = list(box.items())
                del box[key]
            elif isinstance(old, (dict, list)) and old:
                box[key] = type(old)()
            else:
                items = None
                continue
            smaller = repack(parts)
            if still(smaller):
                best = smaller
            elif isinstance(box, dict):
                box.clear()
                box.update(items)
            else:
                box[key] = old
    return best
