"""A real browser for tests: Debian's chromium, driven over a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = os.environ.get("TEST_AXE")
"""The folder of the npm package axe-core, which holds axe.min.js."""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium")


class BrowserError(Exception):
    """The page threw, or the browser answered with an error."""


class Browser:
    """One chromium with one tab. It has no network but the files that a test opens."""

    def __init__(self, profile: Path) -> None:
        self._number = 0
        self._left = b""
        self.events: list[dict[str, Any]] = []
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = [
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
        ]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # chromium refuses to start as root with it

        def pipes() -> None:
            # the protocol is spoken on these two descriptors; copies first, as one may be the other's number
            one, other = os.dup(to_read), os.dup(to_write)
            os.dup2(one, 3)
            os.dup2(other, 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *flags, "about:blank"],
            close_fds=False,
            preexec_fn=pipes,  # noqa: PLW1509 - single-threaded, and the only way to give these numbers
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        targets = self._call("Target.getTargets", {})["targetInfos"]
        (page,) = [each for each in targets if each["type"] == "page"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", {"targetId": page["targetId"], "flatten": True})[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self._call("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})

    def close(self) -> None:
        try:
            self._call("Browser.close", {})
        finally:
            os.close(self._write)
            os.close(self._read)
            self._process.wait(20)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol on the tab."""
        return self._call(method, parameters, self._session)

    def _call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        sent = json.dumps(message).encode() + b"\0"
        while sent:
            sent = sent[os.write(self._write, sent) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            read = os.read(self._read, 1 << 20)
            if not read:
                raise BrowserError("the browser ended")
            self._left += read
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def size(self, width: int, height: int = 900) -> None:
        """Show the page as a screen of this size does; below 600 pixels that of a telephone."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, address: str) -> None:
        """Load a page from the start, and wait until it is there."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=address)
        end = time.monotonic() + 60
        while self.js("document.readyState !== 'complete' || location.href === 'about:blank'"):
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.05)

    def js(self, expression: str) -> Any:
        """Return the value of an expression; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches, as a mouse does; it must be in view and on top."""
        quoted = json.dumps(selector)
        self.js(f"document.querySelector({quoted}).scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
        box = self.js(
            f"(() => {{ const at = document.querySelector({quoted}); const b = at.getBoundingClientRect();"
            " const x = b.x + b.width / 2, y = b.y + b.height / 2; const top = document.elementFromPoint(x, y);"
            " return [x, y, at.contains(top)]; })()"
        )
        assert box[2], f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
        # A click on a link to a place in the page is followed a little later: the page hears of it after this call.
        self.js("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def wait_for(self, selector: str, seconds: float = 20) -> None:
        """Wait until the page has an element that matches."""
        end = time.monotonic() + seconds
        while not self.js(f"document.querySelector({json.dumps(selector)}) !== null"):
            if time.monotonic() > end:
                raise BrowserError(f"the page has no {selector} after {seconds} seconds")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is in view, or the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def problems(self) -> list[str]:
        """Return what the page threw or the browser complained about since it was opened, and what it asked the network for."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(f"asked for {url}")
        return found
