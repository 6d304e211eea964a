"""The report in a real browser: no errors, no requests, copying, sorting, both themes, and a phone's width."""

from __future__ import annotations

import html as entities
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.render.test_texts import attention_step, reduced

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

_FINISH = """
function finish(answer) {
  const out = document.createElement("pre");
  out.id = "answer";
  out.textContent = JSON.stringify(answer);
  document.body.append(out);
}
"""


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


def small_report() -> str:
    snapshot = attention_step()
    reduction = reduced(snapshot)
    return write_report(Facts(snapshot, reduction_script(reduction), VERIFIED, reduction))


def browse(page: Path, *options: str, width: int = 1000) -> subprocess.CompletedProcess[str]:
    """The page as the browser sees it after its scripts have run."""
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
        *("--virtual-time-budget=2000", f"--window-size={width},900", f"--user-data-dir={page.parent / 'profile'}"),
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def ask(folder: Path, html: str, script: str, *options: str) -> Any:
    """What a script in the page answers by calling ``finish``."""
    page = folder / "report.html"
    page.write_text(html.replace("</html>", f"<script>{_FINISH}{script}</script></html>"), encoding="utf-8")
    done = browse(page, *options)
    match = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    return json.loads(entities.unescape(match[1]))


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("make", [small_report, big_report])
def test_it_opens_without_a_word_on_the_console(make: Any, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(make(), encoding="utf-8")
    done = browse(page)
    assert "</html>" in done.stdout
    assert console(done) == []


def test_errors_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(small_report().replace("</html>", "<script>missing()</script></html>"), encoding="utf-8")
    assert any("missing is not defined" in line for line in console(browse(page)))


def test_it_asks_for_nothing(tmp_path: Path) -> None:
    script = 'finish(performance.getEntriesByType("resource").map((entry) => entry.name));'
    assert ask(tmp_path, big_report(), script) == []


def test_it_could_not_ask_for_anything(tmp_path: Path) -> None:
    picture = '<img src="other.svg" alt="">'
    page = tmp_path / "report.html"
    page.write_text(small_report().replace("</main>", f"{picture}</main>"), encoding="utf-8")
    assert any("Content Security Policy" in line for line in console(browse(page)))


_PRESS = """
const copied = [];
const write = async (text) => { if (%s) throw new Error("refused"); copied.push(text); };
Object.defineProperty(navigator, "clipboard", { value: { writeText: write } });
document.execCommand = () => %s;
const button = document.querySelector("button[data-copy]");
button.click();
setTimeout(() => finish({
  copied, label: button.textContent, selected: getSelection().toString(),
  text: document.getElementById("repro").textContent,
}), 100);
"""


def test_the_button_copies_the_repro(tmp_path: Path) -> None:
    answer = ask(tmp_path, small_report(), _PRESS % ("false", "true"))
    assert answer["copied"] == [answer["text"]] and answer["label"] == "Copied"
    compile(answer["text"], "repro.py", "exec")
    assert "F.softmax(x, dim=0)" in answer["text"] and answer["selected"] == ""


@pytest.mark.parametrize(("allowed", "label"), [("true", "Copied"), ("false", "Selected, now press Ctrl+C")])
def test_a_refused_clipboard_selects_the_repro(allowed: str, label: str, tmp_path: Path) -> None:
    answer = ask(tmp_path, small_report(), _PRESS % ("true", allowed))
    assert answer["copied"] == [] and answer["label"] == label
    assert answer["selected"].strip() == answer["text"].strip()
