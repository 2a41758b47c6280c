"""Reports in a real browser: Chromium without a window, and what is asked of a page in it."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from torch_fakeify.records.frame import CaptureDesc, FakeModeDesc, InputDesc, ModesDesc
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.tensor import (
    DictValue,
    FrameDesc,
    FunctionValue,
    MetaTensorDesc,
    NodeValue,
    OpaqueValue,
    StackDesc,
    TensorValue,
    TupleValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)"


def start() -> Browser:
    """A browser; the test is skipped where there is none, and fails where there has to be one."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        if os.environ.get("TORCH_FAKEIFY_NEEDS_BROWSER"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    options = Options()
    options.binary_location = binary
    # Nothing but pages of the tests is ever opened; in a container there is no other sandbox.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--disable-background-networking")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Browser(webdriver.Chrome(options=options, service=Service(driver)))


class Browser:
    """A page, and what a user sees of it and does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, at: str = ""
    ) -> None:
        """Show a page on a screen."""
        self.screen(width, height, dark=dark)
        self.driver.get("about:blank")
        self.said()
        self.driver.get(path.as_uri() + at)

    def screen(self, width: int, height: int, *, dark: bool = False, media: str = "") -> None:
        """Change the screen, the colours that the user prefers, or print."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme], media=media)

    def cdp(self, command: str, **args: Any) -> Any:
        """A command of the browser's own protocol."""
        return self.driver.execute_cdp_cmd(command, args)

    def js(self, body: str, *args: Any) -> Any:
        """What the body of a function returns in the page."""
        return self.driver.execute_script(body, *args)

    def one(self, selector: str) -> Any:
        """An element."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The text of each element, shown or not."""
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
        )

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        """The text of what has the focus, or its id."""
        return self.js("const e = document.activeElement; return e.id || e.textContent")

    def status(self) -> str:
        """What a screen reader is told."""
        return self.one("#hits").get_property("textContent")

    def is_seen(self, selector: str) -> bool:
        """Whether an element is in the window and below the search box that stays there."""
        return self.js(
            "const e = document.querySelector(arguments[0]); if (!e || !e.checkVisibility()) return false;"
            "const r = e.getBoundingClientRect(), top = document.elementFromPoint("
            "Math.min(r.left + 5, innerWidth - 1), r.top + 2);"
            "return r.top >= 0 && r.bottom <= innerHeight && (e === top || e.contains(top))",
            selector,
        )

    def wait(self, holds: Callable[[], Any]) -> Any:
        """What ``holds`` gives once that is true."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if found := holds():
                return found
        raise AssertionError("it never came to be")

    def said(self) -> list[str]:
        """What the console has, and the addresses that were asked for, since the last time."""
        found = [entry["message"] for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                params = message["params"]
                found.append(params.get("url") or params["request"]["url"])
        return found


# --- a large frame that is made up ----------------------------------------------------------------


def large_capture(count: int = 5000) -> CaptureDesc:
    """A frame of so many nodes, in layers of ten each, without torch."""
    tensor = MetaTensorDesc(id=0, dtype="float32", device="cpu", size=(4, 8), stride=(8, 1))
    meta = ("example_value", TensorValue(tensor=tensor))
    nodes = [NodeDesc("placeholder", "x", "x", meta=(meta,))]
    shared: list[DictValue] = []
    add = FunctionValue(kind="op", name="aten.add.Tensor")
    for at in range(1, count - 1):
        layer, part = divmod(at, 10)
        if part == 0 or at == 1:
            shared.append(_modules(layer))
        stack = StackDesc(
            frames=(
                FrameDesc("model.py", 10, "forward", "x = layer(x)"),
                FrameDesc("model.py", 20 + part // 3, "step", f"x = x + {part // 3}"),
            )
        )
        modules = ("nn_module_stack", OpaqueValue(kind="shared", data=len(shared) - 1))
        node = NodeDesc("call_function", f"add_{at}", add, (NodeValue(index=at - 1), at))
        nodes.append(
            NodeDesc(node.op, node.name, node.target, node.args, stack=stack, meta=(modules, meta))
        )
    result = TupleValue(items=(NodeValue(index=count - 2),))
    nodes.append(NodeDesc("output", "output", "output", (result,)))
    return CaptureDesc(
        graph=GraphModuleDesc(nodes=tuple(nodes), shared=tuple(shared)),
        inputs=(InputDesc(name="x", tensor=tensor),),
        modes=ModesDesc(),
        fake_mode=FakeModeDesc(),
        torch_version="2.13.0",
        frame="forward",
    )


def _modules(layer: int) -> DictValue:
    model = TupleValue(items=("L['self'].model", "zoo.Model"))
    inner = TupleValue(items=(f"L['self'].model.layers.{layer}", "zoo.Layer"))
    return DictValue(items=(("0", model), (str(layer + 1), inner)))
