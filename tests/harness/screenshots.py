"""Take the pictures of reports in the docs: ``python tests/harness/screenshots.py [DIRECTORY]``.

A decoder of four blocks whose backend has no kernel for one of its operations, on a wide and a narrow
screen, in the dark, on paper; and a directory of captures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "zoo"), str(ROOT / "tests" / "harness"), str(ROOT)]

from report_pages import start  # noqa: E402
from screen_models import Decoder  # noqa: E402

import torch_fakeify as tfk  # noqa: E402

if TYPE_CHECKING:
    from report_pages import Browser


def chip(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    """Compile a graph, but not the third activation."""
    if any(node.name == "gelu_2" for node in gm.graph.nodes):
        raise NotImplementedError("no kernel for node gelu_2")
    return gm


def scale(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return something that is compiled again for few rows."""
    if x.shape[0] > 3:
        return (x + 1) * y.sum()
    return x * 2


def record(folder: Path) -> None:
    """Record a few frames, the last of which fails."""
    backend = tfk.record(folder, inner=chip)
    compiled = torch.compile(scale, backend=backend)
    for rows in (5, 6, 2):
        compiled(torch.ones(rows, 3), torch.ones(5, 3))
    model = torch.compile(Decoder(), backend=backend, dynamic=True)
    try:
        model(torch.randint(0, 100, (2, 17)))
    except RuntimeError:
        return
    raise AssertionError("the backend compiles all of it")


def take(browser: Browser, page: Path, picture: Path, **screen: object) -> None:
    """Show a page, and save what is seen of it."""
    media = str(screen.pop("media", ""))
    browser.open(page, **screen)
    browser.wait(lambda: browser.texts(".canvas .label") or not browser.texts("#graph"))
    if media:
        width, height = int(str(screen["width"])), int(str(screen["height"]))
        browser.js("dispatchEvent(new Event('beforeprint'))")
        browser.screen(width, height, media=media)
    browser.js(
        "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    browser.driver.save_screenshot(str(picture))


def main() -> None:
    """Write the pictures to a directory, by default that of the docs."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        captures = Path(folder) / "captures"
        record(captures)
        (failed,) = (p for p in captures.glob("*.fkf") if tfk.Capture.load(p).failure)
        page = Path(tfk.report(failed, Path(folder) / "page.html"))
        index = Path(tfk.report(captures, Path(folder) / "captures.html"))
        browser = start()
        try:
            take(browser, page, out / "report.png", width=1400, height=900)
            take(browser, page, out / "report-graph.png", width=1400, height=900, at="#graph")
            take(
                browser,
                page,
                out / "report-dark.png",
                width=1400,
                height=900,
                at="#graph",
                dark=True,
            )
            take(browser, page, out / "report-narrow.png", width=390, height=844)
            take(browser, page, out / "report-narrow-graph.png", width=390, height=844, at="#graph")
            take(browser, page, out / "report-print.png", width=800, height=1130, media="print")
            take(browser, index, out / "report-directory.png", width=1400, height=900)
        finally:
            browser.driver.quit()


if __name__ == "__main__":
    main()
