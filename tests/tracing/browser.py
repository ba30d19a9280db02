"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver and no library beside it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

__all__ = ["Browser", "find_chromium"]

_SECONDS = 60  # for one answer


def find_chromium() -> str | None:
    """Return the command of a Chromium that is installed, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. ``requests``: the addresses that the page asked for; ``errors``: what its console and its scripts
    complained of.
    """

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._stderr = open(f"{self._folder.name}/stderr", "w+")
        # The protocol wants the numbers 3 and 4: first away from these, in case a pipe of ours has one of them.
        moved = f'exec 20<&{to_browser} 21>&{from_browser}; exec 3<&20 4>&21 20<&- 21>&-; exec "$@"'
        options = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars "
            f"--remote-debugging-pipe --disable-background-networking --user-data-dir={self._folder.name}/profile"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", find_chromium(), *options.split(), "about:blank"],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=self._stderr, stderr=self._stderr,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._pending, self._number, self._session = b"", 0, None
        self.requests, self.errors, self._loaded = [], [], False
        (target,) = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._stderr.close()
        self._folder.cleanup()

    def call(self, method: str, **parameters) -> dict:
        """Send a command and return its result; what happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                self._stderr.seek(0)
                raise AssertionError(f"chromium gave no answer in {_SECONDS} s or ended: {self._stderr.read()[-3000:]}")
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(about["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(about)
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path, width=1200, height=900, scheme="light", scripts=True) -> None:
        """Load a file and wait until it is there; what was noted before is forgotten."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.requests, self.errors, self._loaded = [], [], False
        self.call("Page.navigate", url=f"file://{path}")
        while not self._loaded:
            self._note(self._next())
        if scripts:
            self.settle()

    def settle(self) -> None:
        """Wait until the picture has been drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, code: str):
        """Return what JavaScript gives, a promise's value included."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **options) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def move(self, x, y) -> None:
        self.mouse("mouseMoved", x, y)
        self.settle()

    def click(self, x, y) -> None:
        self.drag(x, y, x, y)

    def drag(self, x, y, to_x, to_y) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        if (x, y) != (to_x, to_y):
            self.mouse("mouseMoved", (x + to_x) / 2, (y + to_y) / 2, button="left", buttons=1)
            self.mouse("mouseMoved", to_x, to_y, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, to_y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x, y, pixels) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=pixels)
        self.settle()

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
