"""Drives a headless Chromium over its debugging pipe: opens files, runs JavaScript, takes pictures."""

import json
import os
import subprocess
import tempfile


class Browser:
    def __init__(self, program="chromium"):
        to_browser, self._commands = os.pipe()
        self._events, from_browser = os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

        def connect():  # the browser reads descriptor 3 and writes descriptor 4
            os.dup2(to_browser, 100)
            os.dup2(from_browser, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--remote-debugging-pipe", "--user-data-dir=" + self._profile.name, "about:blank"],
            preexec_fn=connect, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._text, self.problems, self.requests, self._session = 0, b"", [], [], None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def close(self):
        self._session = None
        self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._events)
        self._profile.cleanup()

    def _read(self):
        """Returns the next message, after it has noted errors and requests of the page."""
        while b"\0" not in self._text:
            piece = os.read(self._events, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._text += piece
        message, self._text = self._text.split(b"\0", 1)
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append("console: " + str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append("log: " + params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path, width, dark=False):
        """Opens a file in a window of `width` pixels, and waits until it is loaded and drawn."""
        self.problems, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        while self._read().get("method") != "Page.loadEventFired":
            pass
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")

    def run(self, script):
        """Returns the value of a JavaScript expression; waits for a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def picture(self, path):
        import base64

        height = self.run("Math.ceil(document.documentElement.scrollHeight)")
        width = self.run("innerWidth")
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                          clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(image["data"]))
