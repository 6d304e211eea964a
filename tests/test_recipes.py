"""The programs of `docs/watching-recipes.md` run as they stand there."""

from __future__ import annotations

import http.server
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import reprokit
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "watching-recipes.md").read_text(encoding="utf-8")


def run_recipe(name: str, **variables: Any) -> dict[str, Any]:
    """Run a program of the page with ``train``, which fails at step 12 after a large gradient at step 10."""
    (code,) = re.findall(rf'```python title="{name}.py"\n(.*?)```', PAGE, re.DOTALL)
    space = {"reprokit": reprokit, "Path": Path, "train": train, **variables}
    exec(compile(code, f"{name}.py", "exec"), space)
    return space


def train() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    for step in range(13):
        optimizer.zero_grad()
        (weight.log().sum() * (float("nan") if step == 12 else 1e4 if step == 10 else 1.0)).backward()
        optimizer.step()


def test_a_webhook_gets_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    posted: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run_recipe("webhook", URL=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert posted == ["step 10: the gradient norm is 1.41e+04", "training failed: training-step12.repro.pt"]


def test_a_webhook_that_nobody_answers_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_recipe("webhook", URL="http://127.0.0.1:9")
    assert "webhook: " in capsys.readouterr().out and (tmp_path / "training-step12.repro.pt").exists()


def test_sentry_gets_a_message_with_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentry_sdk = pytest.importorskip("sentry_sdk")
    monkeypatch.chdir(tmp_path)
    sent: list[dict[str, Any]] = []
    options: dict[str, Any] = {"before_send": lambda event, hint: sent.append(event)}
    sentry_sdk.init("http://key@127.0.0.1:9/1", **options)
    run_recipe("sentry")
    sentry_sdk.init(default_integrations=False)
    assert sent[0]["message"] == "nan from torch.Tensor.mul"
    assert sent[0]["tags"]["reprokit.call"] == "torch.Tensor.mul"


def test_a_bounded_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = run_recipe("rotating")["log"]
    log.handlers.pop().close()
    rows = [json.loads(line) for line in (tmp_path / "numbers.jsonl").read_text().splitlines()]
    assert rows and rows[0]["loss"] == 0.0
