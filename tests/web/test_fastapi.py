"""The app of the guide "In a FastAPI app", with FastAPI itself and uvicorn in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.fakes.support import TIMEOUT

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/embedding.md"
BLOCK = re.compile(r"```python(?: no-run)?\n(.*?)```", re.DOTALL)
STATE = "            app.state.consumer = consumer\n"


def program() -> str:
    """The blocks of the guide as one module: the lifespan with the mounted routes, and the app."""
    section = GUIDE.read_text().split("\n## In a FastAPI app\n")[1].split("\n## ")[0]
    lifespan, app, mount = BLOCK.findall(section)
    lifespan, _ = lifespan.split("async def as_a_server_does")  # which runs the lifespan without a server
    imports, mounted = mount.strip().split("\n\n")
    assert lifespan.count(STATE) == 1
    lifespan = lifespan.replace(STATE, f"{STATE}            {mounted}\n")
    return f"{imports}\n{lifespan}\n{app}"


def get(port: int, path: str) -> tuple[int, Any]:
    """Make one request."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def test_the_app_of_the_guide_serves_the_probes_and_drains_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "guide.py").write_text(program())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "guide:app", "--app-dir", str(tmp_path), "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until = time.monotonic() + TIMEOUT
        while True:
            assert server.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            try:
                assert get(port, "/ready") == (200, [])
                break
            except urllib.error.URLError:
                time.sleep(0.05)
        assert get(port, "/lanes/ready") == (200, {"ready": True, "reason": None})
        assert get(port, "/lanes/live")[0] == 200
        assert get(port, "/lanes/status")[1]["healthy"] is True
        server.send_signal(signal.SIGTERM)
        # uvicorn sends itself the signal again at its end.
        assert server.wait(TIMEOUT) in (0, -signal.SIGTERM)
    finally:
        server.kill()
        server.wait()
    text = (tmp_path / "log").read_text()
    assert "Application shutdown complete" in text
    assert "Traceback" not in text
