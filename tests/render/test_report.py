"""The HTML page of a capture: its contents, safety and determinism."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hostile_records import exchanged, places
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from processes import fresh
from report_pages import large_capture
from write_golden import ROOT

from torch_fakeify import cli
from torch_fakeify.records.aliasing import itemsize, storage_range, storages
from torch_fakeify.records.fingerprint import fingerprint
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.tensor import FrameDesc, MetaStorageDesc, MetaTensorDesc, SymDesc
from torch_fakeify.render.nested_graphs import all_graphs
from torch_fakeify.render.report.frame_sections import FrameSections
from torch_fakeify.render.report.html import Html, data_block, digest, lines, tag
from torch_fakeify.render.report.outline import Group, Line, outline, outline_lines
from torch_fakeify.render.report.page import html_page
from torch_fakeify.render.report.parts import NodesOfLines
from torch_fakeify.serialization.capture_file import read_capture, write_capture

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

NAMES = sorted(path.stem for path in ROOT.glob("*.fkf"))
FEW = ("model_llama", "model_step_backward", "program_cond", "program_failed", "aliases")
POISON = "</script><img src=x onerror=alert(1)>\"'&<!--\x1b[31m\u202e\x00`${alert(2)}"
VOID = {"meta", "input"}


def golden(name: str) -> CaptureDesc:
    """Return a record of the golden corpus."""
    return read_capture(ROOT / f"{name}.fkf")


class Page(HTMLParser):
    """An HTML parser that refuses elements that are not closed where they should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_decl(self, decl: str) -> None:
        """Accept the document's own declaration only."""
        assert decl == "DOCTYPE html"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the start of an element."""
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check the end of an element."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Record a text."""
        kind = self._open[-1] if self._open else ""
        {"script": self.scripts, "style": self.styles}.get(kind, self.text).append(data)

    def values(self, attribute: str) -> list[str]:
        """Return the values of an attribute."""
        return [a[attribute] or "" for _, a in self.elements if attribute in a]


def checked(page: str) -> Page:
    """Return a parsed page, checked to run only its own script and to have no outside link."""
    found = Page(page)
    assert [a for tag, a in found.elements if tag == "script"] == [
        {"type": "application/json", "id": "flow"},
        {"type": "application/json", "id": "stacks"},
        {},
    ]
    assert [digest(text) for text in (found.scripts[-1], *found.styles)] == re.findall(
        "'(sha256-[^']+)'", found.values("content")[0]
    )
    attributes = {name for _, a in found.elements for name in a}
    assert not {name for name in attributes if name.startswith("on") or name in ("style", "src")}
    assert {tag for tag, _ in found.elements} <= ELEMENTS
    for name, role in (("table", "table"), ("tr", "row"), ("th", "columnheader"), ("td", "cell")):
        assert {a.get("role") for tag, a in found.elements if tag == name} <= {role}, "as cards too"
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    links = found.values("href")
    assert {link[1:] for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)
    assert set(found.values("for")) | set(found.values("aria-labelledby")) <= set(ids)
    return found


ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "script", "noscript", "header", "nav"),
    *("main", "section", "footer", "h1", "h2", "h3", "p", "pre", "a", "code", "kbd", "span", "div"),
    *("strong", "ul", "ol", "li", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "figure", "figcaption", "svg", "rect", "label", "input", "button"),
}


# --- text -----------------------------------------------------------------------------------------


@given(st.text(), st.text())
def test_a_text_is_escaped(name: str, value: str) -> None:
    """A browser reads a text as it was written, except for what cannot be printed."""
    page = Page(tag("p", name, title=value) + tag("pre", lines(value)))
    assert [tag for tag, _ in page.elements] == ["p", "pre"]
    assert all(char.isprintable() or char == "\n" for char in "".join(page.text))
    if name.isprintable() and name:
        assert page.text[0] == name
    if value.isprintable():
        assert page.elements[0][1] == {"title": value}


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner)))
def test_data_cannot_end_its_element(value: Any) -> None:
    """JSON in a page is read as it was written, and has no character of markup."""
    page = Page(data_block("data", value))
    assert json.loads("".join(page.scripts)) == value
    assert not set("<>&=") & set("".join(page.scripts))


def test_markup_is_built_from_names() -> None:
    """Attributes have a value, none, or are left out; parts that are markup are not escaped."""
    found = tag(
        "a", Html("<b>"), "<b>", class_="x", aria_label='"', hidden=True, id=None, open=False
    )
    assert found == '<a class="x" aria-label="&quot;" hidden><b>&lt;b&gt;</a>'


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(4))
def test_every_golden_file_has_a_page(part: int) -> None:
    """The page is well formed, and has every node of every graph once."""
    for name in NAMES[part::4]:
        desc = golden(name)
        page = checked(html_page(desc))
        graphs = [each.graph for each in all_graphs(desc.graph)]
        rows = {f"n{g}-{at}" for g, graph in enumerate(graphs) for at in range(len(graph.nodes))}
        assert {each for each in page.values("id") if re.match(r"n\d", each)} == rows


def test_the_page_has_the_parts_of_a_frame() -> None:
    """Names, symbols, ranges, guards with their lines, and first of all the failure are there."""
    page = checked(html_page(golden("program_failed")))
    sections = [a["id"] for tag, a in page.elements if tag == "section"]
    assert " ".join(sections) == "failure commands summary symbols inputs storages modes graph"
    text = "\n".join(page.text)
    for part in ("ValueError", "no such kernel\nof two lines", "x.size(0)", "s77",
                 "[2, int_oo]", "L['z'].size()[1]", "matmul", "2.13.0",
                 fingerprint(golden("program_failed"))):  # fmt: skip
        assert part in text, part
    page = checked(html_page(golden("program_item_with_checks")))
    text = "\n".join(page.text)
    assert "n.item() >= 1" in text
    assert "s33 >= 1" in text
    assert "zoo_sizes.py:114 in f: torch._check(k >= 1)" in text
    badges = [a["href"] for _, a in page.elements if a.get("class") == "badge"]
    assert badges == ["#g1", "#g2"]


def test_runtime_asserts_and_binding_sites_have_lines() -> None:
    """A symbol that no input has is linked to the line that binds it, and so is its assert."""
    page = checked(html_page(golden("program_tolist")))
    assert "asserts" in page.values("id")
    assert len(page.values("data-stack")) > len([i for i in page.values("id") if i[0] == "a"])
    assert re.search(r"\d+ nodes? comes? from this line: ", "".join(page.text))


def test_nodes_are_found_by_their_line() -> None:
    """A line is an entry of a node's stack, whose file may be shortened but not another one."""
    graph = golden("model_llama").graph
    name = "sdpa_attention_forward"
    for file, count in (
        ("transformers/integrations/sdpa_attention.py", 6),
        ("integrations/sdpa_attention.py", 6),
        ("grations/sdpa_attention.py", 0),
        ("other/sdpa_attention.py", 0),
    ):
        frame = FrameDesc(file, 193, name, "")
        found = NodesOfLines([graph], [frame, None]).find(frame)
        assert len(found) == count
        assert [node.graph for node in found] == [0] * count
    for other in (FrameDesc(file, 194, name, ""), FrameDesc(file, 193, "forward", "")):
        assert NodesOfLines([graph], [other]).find(other) == []
    assert NodesOfLines([graph], []).find(None) == []


@pytest.mark.parametrize("name", FEW)
def test_a_page_is_deterministic(name: str, tmp_path: Path) -> None:
    """Another process with another hash seed and the record in memory give the same bytes."""
    if name == FEW[0]:
        code = (
            "import sys\n"
            "from torch_fakeify.cli import main\n"
            f"assert main(['report', {str(ROOT / name)!r} + '.fkf', '-o', 'x.html']) == 0\n"
            "print(sorted({'torch', 'sympy', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
        )
        done = fresh("-c", code, cwd=tmp_path, PYTHONHASHSEED="7")
        assert done.stderr == "[]\n", "`report` answers without torch"
        assert (tmp_path / "x.html").read_bytes() == html_page(
            golden(name), file=f"{name}.fkf"
        ).encode()
    write_capture(tmp_path / "again.fkf", golden(name))
    assert html_page(read_capture(tmp_path / "again.fkf")) == html_page(golden(name))


def test_style_and_script_are_in_the_package() -> None:
    """Style sheet and script are installed with the package, and can be embedded as they are."""
    for name in ("report.css", "report.js", "picture.js"):
        text = files("torch_fakeify.render.report").joinpath(name).read_text(encoding="utf-8")
        assert text.isascii()
        assert "</" not in text
        assert "innerHTML" not in text


def test_a_page_limits_its_nodes() -> None:
    """A page of a larger graph has a note on the nodes that are not shown."""
    sections = FrameSections(large_capture(100), most=10)
    page = Page("".join(sections.sections()))
    assert "10 of 100 nodes are shown" in "\n".join(page.text)
    assert len([each for each in page.values("id") if each.startswith("n0-")]) == 10


def test_two_names_of_one_graph_link_to_it() -> None:
    """A node that reads a body by its second name links to the body."""
    desc = large_capture(20)
    body = desc.graph
    nodes = [NodeDesc("get_attr", name, name) for name in ("body", "again", "none")]
    graph = GraphModuleDesc(
        nodes=(*desc.graph.nodes[:1], *nodes, NodeDesc("output", "output", "output")),
        submodules=(("body", body),),
        submodule_aliases=(("again", "body"), ("none", "nowhere")),
    )
    page = checked(html_page(replace(desc, graph=graph)))
    assert [link for link in page.values("href") if "graph1" in link] == ["#graph1"] * 2


# --- hostile captures -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["environment", "program_tolist", *FEW[1:]])
def test_no_text_of_a_capture_is_markup(name: str) -> None:
    """With any text of a file replaced by markup, the page has the same elements and policy."""
    desc = golden(name)
    for kind, path in places(desc, each=1):
        page = checked(html_page(exchanged(desc, path, lambda text: POISON + text)))
        text = "".join(page.text) + "".join(page.scripts[:-1])
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text), kind
        assert not [v for v in page.values("title") if not v.isprintable()], kind


def test_a_text_cannot_be_taken_for_a_link() -> None:
    """The marks by which the page finds nodes in a statement have no meaning in a file."""
    desc = large_capture(20)
    node = replace(desc.graph.nodes[5], args=("\x003\x00",))
    call = replace(node, target=replace(node.target, name="f\x002\x00"))
    nodes = (*desc.graph.nodes[:5], call, *desc.graph.nodes[6:])
    page = html_page(replace(desc, graph=replace(desc.graph, nodes=nodes)))
    row = re.search('<li class="r" id="n0-5">.*?</li>', page)
    assert row is not None
    assert row[0].count("<a ") == 1
    assert "\x00" not in page


# --- storages -------------------------------------------------------------------------------------


def tensor(size: Any, stride: Any, offset: Any = 0, **more: Any) -> MetaTensorDesc:
    """Return the record of a tensor of bytes."""
    fields = {"id": 0, "dtype": "uint8", "device": "cpu", **more}
    return MetaTensorDesc(size=tuple(size), stride=tuple(stride), storage_offset=offset, **fields)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4),
    st.integers(0, 30),
    st.sampled_from(["uint8", "float32", "complex64"]),
)
def test_runs_are_the_bytes_of_the_elements(
    dims: list[tuple[int, int]], offset: int, dtype: str
) -> None:
    """The runs are exactly the bytes of the elements, and the range has the first and last one."""
    unit = itemsize(dtype)
    sizes, strides = [n for n, _ in dims], [step for _, step in dims]
    indices = itertools.product(*map(range, sizes))
    starts = {offset + sum(i * s for i, s in zip(at, strides, strict=True)) for at in indices}
    expected = {start * unit + i for start in starts for i in range(unit)}
    place = storage_range(tensor(sizes, strides, offset, dtype=dtype))
    assert place is not None
    if place.whole:
        assert {byte for begin, end in place.runs for byte in range(begin, end)} == expected
        ends = [end for run in place.runs for end in run]
        assert ends == sorted(set(ends)), "runs are apart and in order"
    assert (place.begin, place.end) == (
        (min(expected), max(expected) + 1) if expected else (offset * unit, offset * unit)
    )


def test_a_place_of_many_runs_is_drawn_as_one() -> None:
    """The gaps between more than 64 runs are dropped."""
    assert len(storage_range(tensor([64, 1], [2, 1])).runs) == 64
    place = storage_range(tensor([65, 1], [2, 1]))
    assert (place.runs, place.whole) == (((0, 129),), False)


def test_sizes_without_a_hint_have_no_place() -> None:
    """A tensor whose size is a number from the data is drawn at no place of its storage."""
    desc = golden("program_item_with_checks")
    sym = next(entry.sym for entry in golden("program_failed").inputs if entry.sym is not None)
    assert storage_range(tensor([sym], [1])).end == sym.hint
    unbacked = SymDesc(expr=sym.expr, hint=None)
    assert storage_range(tensor([unbacked], [1])) is None
    entry = replace(
        desc.inputs[0], tensor=tensor([unbacked], [1], storage=MetaStorageDesc(id=7, nbytes=4))
    )
    text = "\n".join(checked(html_page(replace(desc, inputs=(entry,)))).text)
    assert "not drawn: a size has no hint" in text


@pytest.mark.parametrize(
    "dtype",
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str),
    ids=str,
)
def test_itemsize_is_torchs(dtype: torch.dtype) -> None:
    """The size of an element is derived from the name of its dtype."""
    assert itemsize(str(dtype).removeprefix("torch.")) == dtype.itemsize


def test_tensors_are_grouped_by_storage() -> None:
    """A group has bases before views, and tied inputs are one tensor."""
    shared, tied = storages(golden("aliases"))
    rows = [(each.names, each.depth, each.base) for each in shared.tensors]
    assert rows == [
        (("base",), 0, None),
        (("rows",), 1, "base"),
        (("transposed",), 1, "base"),
        (("other",), 0, None),
    ]
    assert shared.tensors[3].place.runs == ((12, 20), (36, 44))
    assert [each.names for each in tied.tensors] == [("tied", "tied_again")]
    assert not shared.is_plain
    assert not tied.is_plain


def test_a_tensor_that_is_no_input_is_named_by_its_origin() -> None:
    """Bases of views, inner tensors of subclasses and gradients have names."""
    names = [each.names for shared in storages(golden("wrapper_view_of_a_TwoTensor"))
             for each in shared.tensors]  # fmt: skip
    assert ("base of x",) in names
    assert ("x.a",) in names
    assert ("base of x.a",) in names
    names = [each.names for shared in storages(golden("tensor_with_a_gradient"))
             for each in shared.tensors]  # fmt: skip
    assert ("x.grad",) in names


# --- outline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(2))
def test_an_outline_has_every_node_in_order(part: int) -> None:
    """Grouping neither loses nor moves a node."""
    for name in NAMES[part::2]:
        graph = golden(name).graph
        found = [at for line in outline_lines(outline(graph)) for at in line.nodes]
        assert found == [at for at, n in enumerate(graph.nodes) if n.op != "placeholder"]


def paths(parts: list[Any], depth: int = 0) -> list[str]:
    """Return the groups of an outline, indented."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, Group):
            found.append(f"{'  ' * depth}{part.name} {part.cls.rpartition('.')[2]} {part.total}")
            found.extend(paths(part.parts, depth + 1))
    return found


def test_an_outline_follows_the_modules() -> None:
    """Modules contain their parts; a backward graph has the modules of its forward."""
    found = paths(outline(golden("model_llama").graph))
    assert found[0] == "L['self'].model LlamaModel 183"
    assert [line for line in found if line.startswith("  l")] == [
        "  layers.0 LlamaDecoderLayer 64",
        "  layers.1 LlamaDecoderLayer 64",
    ]
    assert "    self_attn LlamaAttention 39" in found
    assert "      q_proj Linear 1" in found
    found = paths(outline(golden("model_step_forward").graph))
    assert found[0].startswith("L['fn'] Sequential")


def test_a_node_without_modules_is_grouped_with_its_neighbours() -> None:
    """A node between two of one module belongs to it, one at an end belongs to none."""
    desc = large_capture(60)
    nodes = list(desc.graph.nodes)
    for at in (1, 15, 30, 58):
        nodes[at] = replace(nodes[at], meta=())
    line, model, *last = outline(replace(desc.graph, nodes=tuple(nodes)))
    assert isinstance(line, Line)
    assert line.nodes == [1]
    assert isinstance(model, Group)
    assert paths([model])[:3] == [
        "L['self'].model Model 56",
        "  layers.0 Layer 8",
        "  layers.1 Layer 10",
    ]
    assert [part.nodes for part in model.parts if isinstance(part, Line)] == [[30]]
    assert [part.nodes for part in last] == [[58], [59]]


# --- the command ----------------------------------------------------------------------------------


def test_the_page_is_written_beside_the_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without -o the page has the file's name, and replaces the earlier page atomically."""
    monkeypatch.chdir(tmp_path)
    write_capture("frame.one.fkf", golden("aliases"))
    Path("frame.one.html").write_text("old")
    assert cli.main(["report", "frame.one.fkf"]) == cli.DONE
    page = Path("frame.one.html").read_bytes()
    assert page.decode() == html_page(golden("aliases"), file="frame.one.fkf")
    assert capsys.readouterr().out == "wrote frame.one.html\n"
    assert cli.main(["report", "--trust", "frame.one.fkf", "-o", "other.html"]) == cli.DONE
    assert Path("other.html").read_bytes() == page
    assert sorted(map(str, Path().iterdir())) == [
        "frame.one.fkf",
        "frame.one.html",
        "other.html",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["none.fkf"],
            "none.fkf: the file cannot be read; found No such file or directory. "
            "Captures beside it: a.fkf",
        ),
        (["a.fkf", "-o", "none/a.html"], "none/a.html: the file cannot be written; found No such "
         "file or directory. Make the directory first"),
        (["a.fkf", "-o", "a.fkf"], "a.fkf: the output is an input; found the same file as a.fkf. Give another path"),
        (["page.html"], "page.html: the output is an input; found the same file as page.html. "
         "Give another path"),
    ],
    ids=["no file", "no directory", "itself", "itself by default"],
)  # fmt: skip
def test_the_report_command_refuses_bad_paths(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The error contains the path and what to do, and no file is changed."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.fkf", "page.html"):
        write_capture(name, golden("aliases"))
    assert cli.main(["report", *args]) == cli.BAD
    assert capsys.readouterr().err == f"torch-fakeify: error: {message}\n"
    assert read_capture("a.fkf") == read_capture("page.html") == golden("aliases")
