"""The report in a real browser: no errors, no requests, and a button that copies the repro."""

from __future__ import annotations

import html as entities
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprokit.program.ir import Call, Input, Program, Ref, Scope, Site
from reprokit.render.facts import Facts
from reprokit.render.report import write_report
from reprokit.render.sources import reduction_script
from reprokit.shrink.reduction import Answered, WhatIfResult
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.source import SourceState
from tests.render.programs import VERIFIED, snapshot_of
from tests.render.test_texts import reduced

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def big_report() -> str:
    """A report with every section and with long words."""
    scope = (
        Scope("", "Net"),
        Scope("a_module_with_a_very_long_name.another_one.and_another_one_in_there", "Attention"),
    )
    site = Site(
        "a/rather/long/path/to/a/file/of/the/users/own/train_the_network.py", 31, "y = torch.log(" + "x" * 90 + ")"
    )
    calls = [Call("torch.neg", (Ref(n),), {}, Ref(n + 1), scope, site) for n in range(30)]
    calls.append(Call("torch.log", (Ref(30),), {}, Ref(31), scope, site))
    weight = Input(0, "encoder.weight", "parameter", True)
    case = (Program(tuple(calls), (weight,), (Ref(31),)), {0: -torch.ones(5, 200)})
    snapshot = snapshot_of(case)
    source = SourceState(("train.py", "--data=" + "x" * 200), diff="+" + "y" * 500)
    environment = Environment(torch="2.13.0", collect_env="z" * 500, variables={"OMP_NUM_THREADS": "1" * 200})
    snapshot = replace(snapshot, source=source, environment=environment)
    row = Answered("fp64", "`float64`", "other", "raises " + "w" * 200, 1e-3)
    log = ["1: cut: 3 calls, 20 elements", "4: sizes: to 1: 1 call, 1 element"]
    reduction = reduced(snapshot, log=log, whatif=WhatIfResult(tables={"minimum": (row,), "context": (row,)}))
    return write_report(Facts(snapshot, reduction_script(reduction), VERIFIED, reduction))


_PRESS = """
const copied = [];
const clipboard = { writeText: async (text) => copied.push(text) };
Object.defineProperty(navigator, "clipboard", { value: clipboard });
const button = document.querySelector("button[data-copy]");
button.click();
setTimeout(() => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify({
    copied, label: button.textContent, text: document.getElementById("repro").textContent,
    resources: performance.getEntriesByType("resource").map((entry) => entry.name),
  });
  document.body.append(answer);
}, 100);
"""


def test_it_opens_without_errors_asks_for_nothing_and_copies_the_repro(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(big_report().replace("</html>", f"<script>{_PRESS}</script></html>"), encoding="utf-8")
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
        *("--virtual-time-budget=2000", "--window-size=1000,900", f"--user-data-dir={tmp_path / 'profile'}"),
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    match = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    answer = json.loads(entities.unescape(match[1]))
    assert answer["resources"] == [] and answer["copied"] == [answer["text"]] and answer["label"] == "Copied"
    compile(answer["text"], "repro.py", "exec")
