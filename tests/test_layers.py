"""The rooms and their walls: who may import whom, read from the sources themselves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torch_fakeify as tfk
from torch_fakeify.dropin_sites import DROPIN_SITES
from torch_fakeify.known_fields import ENUM_MEMBERS, RECORD_FIELDS, SOURCE_MODULES
from torch_fakeify.private_names import private_names
from torch_fakeify.torch_census import TABLES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_fakeify"

# Imports point to a strictly smaller number. A third number orders rooms inside one layer.
LAYERS = {
    "__init__": (99, 0),
    "errors": (0, 0),
    "fork_locks": (0, 0),
    "whole_files": (1, 0),
    "versions": (0, 1),
    "desc": (1, 0),
    "desc_env": (1, 1),
    "desc_graph": (1, 1),
    "desc_frame": (1, 2),
    "_torch": (2, 0),
    "bounds": (2, 0),
    "name_lists": (2, 0),
    "paths": (2, 0),
    "source_fields": (2, 0),
    "strict_json": (2, 0),
    "text": (2, 0),
    "closures": (2, 0),
    "wire": (2, 1),
    "code_text": (2, 1),
    "chains": (2, 1),
    "reader": (2, 2),
    "fast_reader": (2, 3),
    "row_texts": (2, 3),
    "writer": (2, 4),
    "codec": (2, 5),
    "container": (2, 1),
    "page": (2, 2),
    "html_text": (2, 1),
    "outline": (2, 2),
    "storage_map": (2, 0),
    "privacy": (2, 2),
    "exprs": (3, 0),
    "files": (3, 0),
    "fingerprint": (3, 0),
    "user_words": (3, 1),
    "names": (3, 0),
    "meshes": (3, 0),
    "subclass_registry": (3, 0),
    "retarget": (3, 0),
    "size_exprs": (3, 0),
    "fresh_sizes": (3, 1),
    "rewriting": (2, 0),
    "renaming": (3, 0),
    "graph_edits": (3, 0),
    "size_edits": (3, 1),
    "reductions": (3, 2),
    "env_state": (3, 0),
    "env_watch": (3, 1),
    "nested_ints": (3, 0),
    "census": (1, 0),
    "fake_modes": (3, 1),
    "interpreters": (3, 0),
    "conditions": (3, 1),
    "sizes": (3, 2),
    "fakes": (3, 1),
    "stacks": (3, 1),
    "view_ops": (3, 1),
    "eager_views": (3, 0),
    "symbols": (3, 1),
    "values": (3, 1),
    "subclass_context": (3, 2),
    "subclasses": (3, 3),
    "simplex": (3, 0),
    "polynomials": (3, 1),
    "lemmas": (3, 2),
    "refutation": (3, 3),
    "layouts": (3, 2),
    "tracked_items": (3, 0),
    "plain_fakes": (3, 2),
    "kept_fakes": (3, 4),
    "symbolic_leaves": (3, 4),
    "modes": (3, 2),
    "sources": (3, 2),
    "contexts": (3, 3),
    "dtype_views": (4, 0),
    "implied": (4, 0),
    "env_restore": (4, 0),
    "facts": (3, 1),
    "identities": (3, 2),
    "fake_records": (4, 0),
    "refusals": (3, 2),
    "known_layouts": (3, 3),
    "marks": (4, 0),
    "view_calls": (4, 0),
    "scopes": (4, 0),
    "source_guards": (4, 0),
    "input_guards": (4, 1),
    "policies": (4, 1),
    "view_replay": (4, 0),
    "rebuild": (4, 0),
    "wrapped": (4, 0),
    "static_fakes": (3, 3),
    "record_checks": (4, 1),
    "refusing": (1, 0),
    "attribute_scan": (1, 0),
    "known_fields": (1, 0),
    "private_names": (1, 0),
    "dropin_sites": (1, 0),
    "torch_refused": (1, 0),
    "torch_census": (1, 1),
    "torch_gate": (1, 2),
    "scalars": (2, 0),
    "convert": (4, 2),
    "describe": (4, 1),
    "shape_env": (4, 1),
    "checkpoints": (4, 2),
    "frame_inputs": (5, 0),
    "listed_inputs": (5, 0),
    "graph_calling": (5, 0),
    "graph_checks": (5, 0),
    "graph_devices": (5, 0),
    "graph_meta": (5, 0),
    "graph_modules": (5, 0),
    "materialize_kinds": (5, 0),
    "materialize": (5, 1),
    "graph": (5, 1),
    "transfer": (5, 0),
    "expr_nodes": (5, 0),
    "sites": (5, 1),
    "guard_facts": (5, 1),
    "binding_sites": (5, 1),
    "graph_runs": (5, 0),
    "allocations": (5, 2),
    "binding_checks": (5, 2),
    "unbacked_facts": (5, 2),
    "transplants": (5, 5),
    "repropagations": (5, 3),
    "decomposed": (5, 1),
    "retrace_runs": (5, 4),
    "retraces": (5, 5),
    "unbacked": (5, 6),
    "asserted": (5, 2),
    "shape_guards": (5, 2),
    "fresh_env": (5, 4),
    "learned": (5, 5),
    "graph_values": (5, 5),
    "runtime_asserts": (5, 3),
    "replay": (5, 2),
    "frame": (6, 0),
    "captures": (6, 1),
    "trace_formulas": (6, 0),
    "trace_events": (6, 1),
    "trace_log": (6, 2),
    "backend": (7, 0),
    "handoffs": (7, 1),
    "frontend": (7, 2),
    "dropin_desc": (7, 0),
    "dropin_describe": (7, 1),
    "dropin_fast": (7, 2),
    "dropin_walk": (7, 2),
    "dropin_convert": (7, 3),
    "dropin": (7, 4),
    "demo_model": (8, 0),
    "probes": (8, 0),
    "diagnosis": (8, 1),
    "watching": (7, 0),
    "isolation": (8, 0),
    "fork_server": (8, 1),
    "diff": (8, 0),
    "report_lines": (8, 0),
    "report_graph": (8, 1),
    "report_storage": (8, 1),
    "report": (8, 2),
    "size_search": (6, 0),
    "comparing": (5, 0),
    "telling": (5, 0),
    "trials": (7, 0),
    "fuzz": (8, 2),
    "recompiles": (8, 1),
    "script": (8, 2),
    "child": (8, 1),
    "verdict": (8, 1),
    "failures": (8, 2),
    "repro_script": (8, 3),
    "minify": (8, 4),
    "demo": (8, 2),
    "corpus_results": (3, 0),
    "junit": (3, 1),
    "progress": (1, 0),
    "corpus_files": (8, 2),
    "corpus_jobs": (8, 2),
    "dask_cluster": (8, 0),
    "corpus": (8, 3),
    "corpus_run": (8, 4),
    "pytest_plugin": (9, 0),
    "cli": (9, 0),
    "__main__": (10, 0),
}

TORCH_FREE = {
    name
    for name, (layer, _) in LAYERS.items()
    if (layer <= 2 and name != "_torch") or name in {"files", "__init__", "report"}
}

PRIVATE = re.compile(
    r"torch\._|torch\.fx\.experimental(\.|$)|torch\.utils\.(_sympy|_pytree|_python_dispatch)"
    r"|torch\.\w+\._"
)

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def tree_of(module: str) -> ast.Module:
    """The syntax tree of one module of the package."""
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def guarded_by_type_checking(tree: ast.Module) -> set[ast.AST]:
    """Every statement under ``if TYPE_CHECKING:``, which never runs."""
    found: set[ast.AST] = set()
    for entry in ast.walk(tree):
        if isinstance(entry, ast.If) and ast.unparse(entry.test).endswith("TYPE_CHECKING"):
            for statement in entry.body:
                found.update(ast.walk(statement))
    return found


def imports_of(module: str, *, typing_too: bool = True) -> set[str]:
    """Absolute dotted names that the module imports anywhere, also inside functions.

    ``from a.b import c`` counts as ``a.b`` and as ``a.b.c``, because ``c`` may be a module.
    """
    tree = tree_of(module)
    skip = set[ast.AST]() if typing_too else guarded_by_type_checking(tree)
    names: set[str] = set()
    for entry in ast.walk(tree):
        if entry in skip:
            continue
        if isinstance(entry, ast.Import):
            names.update(alias.name for alias in entry.names)
        elif isinstance(entry, ast.ImportFrom):
            home = entry.module or ""
            if entry.level:
                home = f"torch_fakeify.{home}".rstrip(".")
            names.add(home)
            names.update(f"{home}.{alias.name}" for alias in entry.names)
    return names


def rooms_of(module: str, *, typing_too: bool = True) -> set[str]:
    """Modules of the package that a module imports."""
    found: set[str] = set()
    for name in imports_of(module, typing_too=typing_too):
        parts = name.split(".")
        if parts[0] == "torch_fakeify" and len(parts) > 1 and parts[1] in MODULES:
            found.add(parts[1])
    return found


def test_every_module_has_a_layer() -> None:
    """A new module is put into the table before anything imports it."""
    assert set(MODULES) - set(LAYERS) == set()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    """A module imports only modules of strictly lower rooms."""
    wrong = {room for room in rooms_of(module) if LAYERS[room] >= LAYERS[module]}
    assert wrong == set()


def test_describe_and_convert_share_only_records() -> None:
    """Neither side of the boundary reaches the other, not even through a third room."""
    for start, forbidden in (("describe", "convert"), ("convert", "describe")):
        if start not in MODULES:
            continue
        seen: set[str] = set()
        todo = [start]
        while todo:
            room = todo.pop()
            if room not in seen:
                seen.add(room)
                todo.extend(rooms_of(room))
        assert forbidden not in seen


@pytest.mark.parametrize("module", MODULES)
def test_private_torch_only_in_one_room(module: str) -> None:
    """Torch's private modules are imported in ``_torch`` alone."""
    if module == "_torch":
        return
    assert {name for name in imports_of(module) if PRIVATE.match(name)} == set()


@pytest.mark.parametrize("module", sorted(TORCH_FREE & set(MODULES)))
def test_light_rooms_are_torch_free(module: str) -> None:
    """The rooms that ``show`` and ``report`` need import neither torch nor sympy, directly or through others."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        room = todo.pop()
        if room in seen:
            continue
        seen.add(room)
        top = {name.partition(".")[0] for name in imports_of(room, typing_too=False)}
        assert top & {"torch", "sympy", "numpy"} == set(), room
        todo.extend(rooms_of(room, typing_too=False))


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_runs_a_file(module: str) -> None:
    """No room unpickles, evaluates text or parses expressions from text."""
    banned_imports = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert {name.partition(".")[0] for name in imports_of(module)} & banned_imports == set()
    banned_calls = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}
    called = {
        entry.func.id
        for entry in ast.walk(tree_of(module))
        if isinstance(entry, ast.Call) and isinstance(entry.func, ast.Name)
    }
    assert called & banned_calls == set()


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_imported_by_a_computed_name(module: str) -> None:
    """Only the package's own table of names imports what is not written out in the source.

    And `private_names`, which imports what the source of ``_torch`` has, and the tables of the census.
    """
    if module in ("__init__", "private_names"):
        return
    for entry in ast.walk(tree_of(module)):
        if isinstance(entry, ast.Call) and "import_module" in ast.unparse(entry.func):
            assert all(isinstance(arg, ast.Constant) for arg in entry.args), entry.lineno


def test_what_is_looked_up_in_torch_is_what_one_room_imports() -> None:
    """The census reaches no private module that ``_torch`` does not, but those of the drop-in's sites."""
    needed = [*private_names(), *(f"{site}." for site in DROPIN_SITES)]
    tables = [*TABLES, *RECORD_FIELDS, *ENUM_MEMBERS, *SOURCE_MODULES]
    modules = {name if name in SOURCE_MODULES else name.rpartition(".")[0] for name in tables}
    assert {m for m in modules if not any(f"{n}.".startswith(f"{m}.") for n in needed)} == set()


def test_every_name_of_torchs_private_modules_is_used() -> None:
    """``_torch`` has no ``__all__`` by which a linter would find what nothing needs any more."""
    here = tree_of("_torch")
    defined = {
        alias.asname or alias.name
        for entry in here.body
        if isinstance(entry, ast.ImportFrom) and entry.level == 0
        for alias in entry.names
    }
    defined |= {entry.name for entry in here.body if isinstance(entry, ast.FunctionDef)}
    used = {entry.id for entry in ast.walk(here) if isinstance(entry, ast.Name)}
    for module in set(MODULES) - {"_torch"}:
        for entry in ast.walk(tree_of(module)):
            if isinstance(entry, ast.ImportFrom) and entry.module == "_torch":
                used |= {alias.name for alias in entry.names}
            elif isinstance(entry, ast.Attribute) and ast.unparse(entry.value) == "_torch":
                used.add(entry.attr)
    assert defined - used - {"annotations", "TYPE_CHECKING"} == set()


def test_no_module_has_the_name_of_a_public_function() -> None:
    """``tfk.capture`` is a function for good: no import of a submodule can shadow it."""
    assert set(tfk.__all__) & set(MODULES) == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_room_is_small(module: str) -> None:
    """A file past 700 lines is split by noun."""
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 700


@pytest.mark.parametrize("module", MODULES)
def test_no_swallowed_exception(module: str) -> None:
    """No handler of everything just passes."""
    for entry in ast.walk(tree_of(module)):
        if not isinstance(entry, ast.ExceptHandler):
            continue
        broad = entry.type is None or ast.unparse(entry.type) in {"Exception", "BaseException"}
        empty = all(isinstance(statement, ast.Pass) for statement in entry.body)
        assert not (broad and empty), f"{module}.py:{entry.lineno}"


def test_readme_lists_every_room() -> None:
    """The README's table of rooms names each module, at the layer it is in."""
    rows = re.findall(
        r"^\| (\d+) \| (.*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = {
        (name, int(layer)) for layer, cell in rows for name in re.findall(r"`(\w+)\.py`", cell)
    }
    expected = {(name, LAYERS[name][0]) for name in MODULES if name not in {"__init__", "__main__"}}
    assert expected - listed == set()
    assert {name for name, _ in listed} - set(LAYERS) == set()
