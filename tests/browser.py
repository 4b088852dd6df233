"""A headless Chromium, driven over a pipe by the DevTools protocol: no driver, no server.

`chromium --remote-debugging-pipe` reads commands from file descriptor 3 and writes answers and
events to 4: JSON, each ended by a zero byte.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

FOUND = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
needed = pytest.mark.skipif(
    FOUND is None and not os.environ.get("PLURAX_TEST_BROWSER"),  # CI sets it
    reason="there is no chromium on this machine: make chromium installs it",
)
"""For tests that need it."""
SECONDS = 60
"""The most that the browser may take for one answer."""


class Browser:
    """One page in a browser. Use as a context manager.

    **Attributes:** `said`, what the page wrote to its console as errors and warnings, exceptions,
    and what the browser refused; `asked`, the addresses that the page loaded.
    """

    def __init__(self, width=1280, height=900, *, dark=False, phone=False):
        self._size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1,
                      "mobile": phone}  # fmt: skip
        self._dark, self._phone = dark, phone
        self.said, self.asked = [], []
        self._count, self._rest = 0, b""

    def __enter__(self):
        assert FOUND, "there is no chromium on this machine: make chromium installs it"
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        (read, self._out), (self._in, write) = os.pipe(), os.pipe()
        command = [FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--disable-extensions", "--disable-background-networking",
                   f"--user-data-dir={folder}", "--remote-debugging-pipe",
                   "about:blank"]  # fmt: skip
        # Out of the way of 3 and 4, which they become in the browser.
        given = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (read, write)]
        nowhere = [(os.POSIX_SPAWN_OPEN, one, os.devnull, os.O_RDWR, 0) for one in range(3)]
        pipes = [(os.POSIX_SPAWN_DUP2, one, 3 + place) for place, one in enumerate(given)]
        self._process = os.posix_spawn(FOUND, command, os.environ, file_actions=[*nowhere, *pipes])
        for one in (read, write, *given):
            os.close(one)
        self._session = None
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in pages if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", **self._size)
        if self._phone:
            self.send("Emulation.setTouchEmulationEnabled", enabled=True)
        scheme = "dark" if self._dark else "light"
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        return self

    def __exit__(self, *_):
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._out)
        os.close(self._in)
        self._stack.close()

    def send(self, method, /, **params):
        """Send a command, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self):
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, params):
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.said.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, path):
        """Open a file, and return when the page says that it is ready."""
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        self.wait("document.documentElement.dataset.ready === 'true'")

    def run(self, code):
        """Return what an expression of JavaScript is, a promise awaited."""
        found = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition):
        """Return once a condition holds in the page; it is looked at after each frame."""
        code = (
            "new Promise((done) => { const look = () => { let held = false;"
            f" try {{ held = {condition}; }} catch {{ held = false; }}"
            " if (held) done(true); else setTimeout(look, 20); }; look(); })"
        )
        assert self.run(code)

    def drag(self, start, end, steps=8):
        """Move the pressed mouse from a place in the window to another."""
        mouse = {"button": "left", "clickCount": 1}
        x, y = start
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.send("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
        for step in range(1, steps + 1):
            at = [a + (b - a) * step / steps for a, b in zip(start, end, strict=True)]
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1], buttons=1,
                      button="left")  # fmt: skip
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **mouse)

    def touch(self, start, end, steps=10):
        """Move a finger from a place in the window to another."""
        for step in range(steps + 1):
            x, y = (a + (b - a) * step / steps for a, b in zip(start, end, strict=True))
            kind = "touchMove" if step else "touchStart"
            self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def click(self, place, times=1):
        """Click on a place in the window."""
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1],
                          button="left", clickCount=count)  # fmt: skip

    def press(self, key):
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path, *, whole=False):
        """Save what is in view, or the whole page, as PNG."""
        more = {}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            more = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        data = self.send("Page.captureScreenshot", format="png", **more)["data"]
        Path(path).write_bytes(base64.b64decode(data))
