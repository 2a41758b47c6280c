"""The picture of a graph, and the page of a directory, in a real browser."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from report_pages import Browser, large_capture
from selenium.webdriver.common.keys import Keys
from write_golden import ROOT

from torch_fakeify import cli
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.serialization.capture_file import read_capture, write_capture

if TYPE_CHECKING:
    from pathlib import Path

BOXES = """
return [...document.querySelectorAll(".canvas .box")].map((box) => ({
  label: box.querySelector(".label").textContent,
  kind: box.classList[1],
  open: box.classList.contains("open"),
  failing: box.classList.contains("failing"),
}));
"""


def opened(browser: Browser, page: Path, **how: object) -> Browser:
    """Open a page, and wait until its picture is drawn."""
    browser.open(page, **how)
    browser.wait(lambda: browser.texts(".canvas .label"))
    return browser


@pytest.fixture
def llama(browser: Browser, tmp_path: Path) -> Browser:
    """The opened page of a model."""
    page = tmp_path / "llama.html"
    assert cli.main(["report", str(ROOT / "model_llama.fkf"), "-o", str(page)]) == cli.DONE
    return opened(browser, page, width=1400)


def labels(browser: Browser, kind: str = "") -> list[str]:
    """Return the labels of the boxes that are drawn."""
    return [box["label"] for box in browser.js(BOXES) if not kind or box["kind"] == kind]


def press(browser: Browser, label: str) -> None:
    """Click on the first box with a label."""
    browser.js(
        """
        const head = [...document.querySelectorAll(".canvas .head")].find(
          (e) => e.querySelector(".label").textContent === arguments[0]);
        head.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        """,
        label,
    )


def test_a_module_unfolds_in_its_place(llama: Browser) -> None:
    """A box shows what is in it and what enters it; folded again, the picture is the same."""
    llama.one(".zoom [data-do=fold]").click()
    outer = labels(llama)
    assert "+ self.model" in outer
    press(llama, "+ self.model")
    assert "+ layers[0]" in labels(llama)
    press(llama, "+ layers[0]")
    press(llama, "+ self_attn")
    inside = labels(llama)
    assert {"+ q_proj", "+ k_proj", "+ v_proj", "+ o_proj"} <= set(inside)
    assert labels(llama, "entry"), "what enters a module has a name"
    press(llama, "\u2212 self.model")
    assert labels(llama) == outer


def test_data_flow_is_drawn_from_layer_to_layer(llama: Browser) -> None:
    """Each line starts below its source and ends above its target, in a picture without overlaps."""
    bad = llama.js(
        """
        const boxes = [...document.querySelectorAll(".canvas .box")];
        const bad = [];
        for (const a of boxes) for (const b of boxes) {
          if (a === b || a.contains(b) || b.contains(a)) continue;
          const [p, q] = [a, b].map((e) => e.querySelector("rect").getBoundingClientRect());
          const apart = p.right <= q.left + 1 || q.right <= p.left + 1 || p.bottom <= q.top + 1 || q.bottom <= p.top + 1;
          if (!apart) bad.push([a.textContent, b.textContent]);
        }
        for (const line of document.querySelectorAll(".canvas .edge")) {
          const [from, to] = [line.getPointAtLength(0), line.getPointAtLength(line.getTotalLength())];
          if (from.y > to.y) bad.push(line.getAttribute("d"));
        }
        return [boxes.length, document.querySelectorAll(".canvas .edge").length, bad];
        """
    )
    assert bad[0] > 10
    assert bad[1] > 10
    assert bad[2] == []


def test_an_operation_shows_its_row(llama: Browser) -> None:
    """A click on an operation marks its row in the graph, and its box."""
    llama.one(".zoom [data-do=fold]").click()
    press(llama, "+ self.model")
    operation = next(iter(labels(llama, "node")))
    press(llama, operation)
    row = llama.wait(lambda: llama.texts(".defined"))
    assert operation in row[0]
    assert llama.wait(lambda: llama.is_seen(".defined"))
    assert llama.texts(".canvas .here .label")[0] == operation


def test_keys_move_through_the_picture(llama: Browser) -> None:
    """Arrows move between boxes, fold and unfold; the focus is never lost."""
    llama.one(".zoom [data-do=fold]").click()
    llama.one(".zoom [data-do=fit]").send_keys(Keys.TAB)
    focused = "return document.activeElement.querySelector('.label')?.textContent"
    seen = [llama.js(focused)]
    while seen[-1] != "+ self.model":
        llama.keys(Keys.ARROW_DOWN)
        assert llama.js(focused) not in seen
        seen.append(llama.js(focused))
    llama.keys(Keys.ARROW_RIGHT)
    assert llama.js(focused) == "\u2212 self.model"
    assert llama.js("return document.activeElement.getAttribute('aria-expanded')") == "true"
    llama.keys(Keys.ARROW_DOWN)
    around = "document.activeElement.closest('.box').parentElement.closest('.box')"
    assert llama.js(f"return {around}.querySelector('.label').textContent") == "\u2212 self.model"
    llama.keys(Keys.ARROW_LEFT)
    assert llama.js(focused) == "\u2212 self.model"
    llama.keys(Keys.ENTER)
    assert llama.js(focused) == "+ self.model"
    assert llama.js("return document.querySelectorAll('.canvas [tabindex=\"0\"]').length") == 1


def test_where_a_backend_failed_is_unfolded(browser: Browser, tmp_path: Path) -> None:
    """The failing node is marked in picture and rows, linked from the failure, and in sight."""
    desc = read_capture(ROOT / "model_llama.fkf")
    node = next(n for n in desc.graph.nodes if n.name.startswith("rsqrt_"))
    failure = FailureDesc(type="builtins.ValueError", message=f"no kernel for {node.name}")
    write_capture(tmp_path / "failed.fkf", replace(desc, failure=failure))
    assert cli.main(["report", str(tmp_path / "failed.fkf")]) == cli.DONE
    opened(browser, tmp_path / "failed.html", width=1400)
    failing = [box["label"] for box in browser.js(BOXES) if box["failing"]]
    assert failing[-1] == "rsqrt"
    assert len(failing) > 1, "the modules around it are marked, too"
    assert browser.texts(".r.failing .d") == [node.name]
    link = browser.one("#failure p a")
    assert link.text == node.name
    link.click()
    assert browser.wait(lambda: browser.is_seen(".r.failing"))
    inside = browser.js(
        """
        const box = [...document.querySelectorAll(".canvas .failing > .head")].at(-1).getBoundingClientRect();
        const seen = document.querySelector(".canvas").getBoundingClientRect();
        return box.top >= seen.top && box.bottom <= seen.bottom && box.left >= seen.left - 1;
        """
    )
    assert inside


@pytest.mark.sweep
def test_a_picture_of_sixty_thousand_nodes_can_be_used(browser: Browser, tmp_path: Path) -> None:
    """It is drawn in less than ten seconds, in runs of modules, and a run unfolds."""
    write_capture(tmp_path / "large.fkf", large_capture(60_000))
    assert cli.main(["report", str(tmp_path / "large.fkf")]) == cli.DONE
    opened(browser, tmp_path / "large.html")
    assert len(labels(browser)) < 100
    press(browser, "+ self.model")
    run = next(label for label in labels(browser) if "\u2026" in label)
    seconds = browser.js(
        """
        const head = [...document.querySelectorAll(".canvas .head")].find(
          (e) => e.querySelector(".label").textContent === arguments[0]);
        const begin = performance.now();
        head.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        return (performance.now() - begin) / 1000;
        """,
        run,
    )
    assert len(labels(browser)) > 10
    assert seconds < 10


# --- a directory ----------------------------------------------------------------------------------


@pytest.fixture
def folder(browser: Browser, tmp_path: Path) -> Browser:
    """The opened page of a directory of three captures."""
    captures = tmp_path / "captures"
    captures.mkdir()
    for name in ("program_failed", "program_cond", "model_llama"):
        shutil.copy(ROOT / f"{name}.fkf", captures)
    assert cli.main(["report", str(captures)]) == cli.DONE
    browser.open(tmp_path / "captures.html")
    return browser


def test_a_frame_of_a_directory_is_opened_from_the_index(folder: Browser) -> None:
    """Each frame is folded until it is asked for; then search, links and picture are its own."""
    files = folder.texts("#index td:first-child a")
    assert files == ["model_llama.fkf", "program_cond.fkf", "program_failed.fkf"]
    assert folder.texts("#index .bad") == ["failed: ValueError"]
    assert folder.js("return document.querySelectorAll('.frame[open]').length") == 0
    folder.one("#index tr:nth-child(2) a").click()
    folder.wait(lambda: folder.js("return document.querySelector('#f1').open"))
    folder.wait(lambda: folder.texts("#f1 .canvas .label"))
    assert not folder.texts("#f0 .canvas .label")
    folder.keys("/")
    assert folder.focused() == "f1-query"
    folder.keys("sin", Keys.ENTER)
    assert folder.one("#f1-hits").get_property("textContent").endswith(" hits")
    assert all(
        folder.js("return [...document.querySelectorAll('.hit')].map(e => !!e.closest('#f1'))")
    )
    folder.keys(Keys.ESCAPE)
    link = folder.js("return document.querySelector('#f1 .r .s a:not(.d)')")
    folder.js("arguments[0].scrollIntoView({block: 'center'})", link)
    name = link.text
    link.click()
    assert folder.wait(lambda: folder.texts("#f1 .defined .d")) == [name]


def test_a_command_can_be_copied(folder: Browser) -> None:
    """The button copies a command, or selects it where the browser does not permit that."""
    folder.one("#index tr:nth-child(3) a").click()
    folder.wait(lambda: folder.is_seen("#f2-commands .copy"))
    button = folder.one("#f2-commands .copy")
    button.click()
    assert folder.wait(lambda: button.text in ("Copied", "Selected"))
    assert (
        folder.js("return getSelection().toString()") == "torch-fakeify minify program_failed.fkf"
    )
