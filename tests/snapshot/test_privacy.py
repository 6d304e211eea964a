"""Nothing private gets into a snapshot or out of it: credentials from anywhere, source beyond the policy, data unasked.

Secrets are made at run time, so that no file of the project looks as if it held one.
"""

from __future__ import annotations

import re
import secrets
import string
import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit import grammar
from reprokit.cli import main
from reprokit.program.ir import OPAQUE, Call, Input, ModuleNote, Program, Ref, Site
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot import privacy
from reprokit.snapshot.format import Snapshot, load, save
from reprokit.snapshot.privacy import private
from reprokit.snapshot.redact import redact_text, shorten_paths, without_source
from reprokit.snapshot.source import SourceState
from reprokit.words import quoted, with_code, without_code
from tests.conftest import import_benchmark, run_python_in
from tests.render.programs import site_of, snapshot_of

ALPHANUMERIC = string.ascii_letters + string.digits
SCRIPT = """\
import os
import torch

{line}
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    secret = weight - step
    loss = torch.log(secret).sum()  # password: {password}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def made(prefix: str = "", count: int = 36, alphabet: str = ALPHANUMERIC) -> str:
    """A random key with at least one letter and one digit."""
    return prefix + "a1" + "".join(secrets.choice(alphabet) for _ in range(count - 2))


def contents_of(path: Path) -> str:
    """Everything that a snapshot says, as one text."""
    snapshot = load(path)
    return repr([getattr(snapshot, name) for name in Snapshot.__dataclass_fields__ if name != "tensors"])


# -- source and text ---------------------------------------------------------------------------------------------------


def test_code_inside_a_traceback_is_source() -> None:
    key = made()
    library = "/srv/project-x/venv/lib/python3.11/site-packages/torch/nn/functional.py"
    text = (
        f'  File "{library}", line 3, in f\n    secret = query12 + token_states34\n'
        f'  File "train.py", line 9\n    login(password="{key}")\nValueError: password={key}'
    )
    clean = redact_text(text)
    assert "secret = query12 + token_states34" in clean
    assert key not in clean and "project-x" not in clean and 'File "torch/nn/functional.py"' in clean


def test_absolute_paths_become_short() -> None:
    text = 'open("/mnt/customers/acme/x.pt"), a/b/c, https://example.org/a/b, /usr/lib/libc.so.6, N/A'
    assert shorten_paths(text) == 'open("x.pt"), a/b/c, https://example.org/a/b, /usr/lib/libc.so.6, N/A'


# -- a whole capture ---------------------------------------------------------------------------------------------------


def test_no_secret_reaches_a_snapshot_or_an_issue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import git

    flag, variable, password = made("hf_"), made(), made()
    remote, literal, quoted = made("ghp_"), made(), made()
    with git.Repo.init(tmp_path, initial_branch="trunk") as repository:
        repository.create_remote("origin", f"https://me:{remote}@github.com/org/project.git")
        with repository.config_writer() as config:
            config.set_value("user", "name", "Ada Lovelace")
            config.set_value("user", "email", "ada@example.org")
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(line="", password="none"))
        repository.index.add(["train.py"])
        commit = repository.index.commit("first").hexsha
    script.write_text(SCRIPT.format(line=f'api_key = "{literal}"', password=password))
    monkeypatch.setenv("WANDB_API_KEY", variable)
    monkeypatch.setenv("TORCH_EXTRA", f"token={quoted}")
    monkeypatch.setenv("TORCH_HOME", "/data/ada@example.org")
    options = ["--json", "-f", "-o", "snap.repro.pt"]
    data = f"--data=https://u:{password}@example.org/d"
    script_and_arguments = ["train.py", "--hub-token", flag, "--max-tokens", "512", data, "--notify", "ada@example.org"]
    done = run_python_in(tmp_path, "-m", "reprokit", "capture", "--source", "all", *options, *script_and_arguments)
    assert done.returncode == 3, done.stderr
    said = contents_of(tmp_path / "snap.repro.pt") + done.stdout + done.stderr
    for secret in (flag, variable, password, remote, literal, quoted, "ada@example.org", "Lovelace"):
        assert secret not in said
    assert commit in said and "'--max-tokens', '512'" in said and "+api_key = " in said
    assert "loss = torch.log(secret).sum()  # password: ***" in said
    issue = tmp_path / "issue.md"
    assert main(["render", str(tmp_path / "snap.repro.pt"), "--as", "issue", "-o", str(issue)]) == 0
    text = issue.read_text()
    assert "torch.log(secret).sum()" in text and str(tmp_path) not in text
    for secret in (flag, variable, password, remote, literal, quoted):
        assert secret not in text


# -- how much source ---------------------------------------------------------------------------------------------------


STATEMENT = "y = f(\n    torch.log(x),\n    margin)"


def with_source() -> Snapshot:
    """A snapshot with source text of every kind."""
    calls = (
        Call(
            OPAQUE, (), {"name": "Mine", "source": "class Mine: ..."}, Ref(2), site=Site("train.py", 1, "Mine.apply(x)")
        ),
        Call("torch.log", (Ref(0),), {}, Ref(1), (), site_of(STATEMENT, "torch.log(x)", 2)),
    )
    note = ModuleNote("Net", file="train.py", line=1, source="class Net(nn.Module): ...")
    program = Program(calls, (Input(0, "x"), Input(2, "mine", role="opaque")), (Ref(1),), {"net": note})
    snapshot = snapshot_of((program, {0: torch.tensor([-1.0]), 2: torch.ones(1)}))
    return replace(snapshot, source=SourceState(("train.py",), "0" * 40, diff="+x = 1"))


@pytest.mark.parametrize(
    ("policy", "kept", "gone"),
    [
        ("all", ["torch.log(x)", "margin", "Mine.apply(x)", "class Mine", "class Net", "+x = 1"], []),
        ("traceback", ["torch.log(x)", "margin", "Mine.apply(x)"], ["class Mine", "class Net", "+x = 1"]),
        ("none", [], ["torch.log(x)", "margin", "Mine.apply(x)", "class Mine", "class Net", "+x = 1"]),
    ],
)
def test_the_policy_decides_what_is_kept(tmp_path: Path, policy: Any, kept: list[str], gone: list[str]) -> None:
    save(private(with_source(), policy), tmp_path / "snap.pt")
    said = contents_of(tmp_path / "snap.pt")
    assert all(text in said for text in kept) and not any(text in said for text in gone)
    assert "train.py" in said and "0" * 40 in said  # places and the commit stay


def test_a_text_shows_no_more_source_than_asked(tmp_path: Path) -> None:
    save(with_source(), tmp_path / "snap.pt")
    out = tmp_path / "issue.md"
    assert main(["render", str(tmp_path / "snap.pt"), "--as", "issue", "--source", "none", "-o", str(out)]) == 0
    assert "`train.py:2`" in out.read_text() and "torch.log(x)`" not in out.read_text()


SILENT = """\
import torch
encoder, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
for step in range(60):
    hidden_recipe = encoder(torch.randn(8, 4)).detach()
    loss = head(hidden_recipe).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RAISED = """\
import torch
torch.manual_seed(0)
recipe = {"sizes": [torch.zeros(1), 4.0, torch.ones(7)]}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    mixed = model(torch.randn(8, 4))
    if step == 2:
        mixed = mixed * recipe["sizes"][2]
    mixed.pow(2).mean().backward()
    optimizer.step()
"""
SETTING = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
recipe = {"scale": 1.0}
for step in range(12):
    if step == 8:
        recipe["scale"] = 1e30
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    loss = torch.exp(torch.mul(model(x) + 1.0, recipe["scale"] * 0.5)).mean()
    loss.backward()
    optimizer.step()
"""
_MARKS = re.compile("[\u2061\u2062\u2064]")


def everything_in(folder: Path) -> dict[str, str]:
    """The texts of all files, of a file of tensors those beside the tensors."""
    found = {}
    for file in folder.rglob("*"):
        if file.suffix == ".pt":
            with zipfile.ZipFile(file) as archive:
                pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
                found[file.name] = b"".join(map(archive.read, pickles)).decode(errors="replace")
        elif file.is_file():
            found[file.name] = file.read_text()
    return found


def everything_of(folder: Path, script: str, policy: str) -> dict[str, str]:
    """All that a capture and what follows it print and write about a script."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    run = partial(run_python_in, folder, "-m", "reprokit")
    kinds = ["--on", "nonfinite", "--on", "exception", "--on", "silent"]
    done = run("capture", "--source", policy, *kinds, "-o", "snap.repro.pt", "train.py")
    said = "\n".join(line for line in done.stderr.splitlines() if line.startswith("reprokit:"))
    assert (folder / "snap.repro.pt").exists(), done.stderr
    commands = {
        "show": ["show", "snap.repro.pt"],
        "shrink": ["shrink", "--fast", "--max-time", "10", "snap.repro.pt"],
        "render": ["render", "snap.repro.pt", "--as", "report"],
    }
    printed = {name: run(*words) for name, words in commands.items()}
    (folder / "train.py").unlink()
    written = everything_in(folder)
    return written | {"capture": said} | {name: done.stdout + done.stderr for name, done in printed.items()}


@pytest.mark.slow
@pytest.mark.parametrize("script", [SILENT, RAISED, SETTING], ids=["silent", "raised", "setting"])
def test_no_line_of_source_is_printed_or_stored(tmp_path: Path, script: str) -> None:
    lines = [line.strip() for line in script.splitlines() if "recipe" in line]
    shown = everything_of(tmp_path / "shown", script, "traceback")
    assert any(line in text for line in lines for text in shown.values())
    assert not [name for name, text in shown.items() if not name.endswith(".pt") and _MARKS.search(text)]
    hidden = everything_of(tmp_path / "hidden", script, "none")
    assert "train.py:" in hidden["capture"]
    assert not [(name, line) for name, text in hidden.items() for line in [*lines, 'recipe["'] if line in text]


SCRIPTED = """\
import torch
@torch.jit.script
def scripted(x):
    secret_a = x.view(
        7, -1)
    return secret_a.exp()
layer = torch.nn.Linear(4, 2)
scripted(layer(torch.ones(3, 4))).sum().backward()
"""
INSPECTED = """\
import inspect
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        secret_b = inspect.getsource(Net)  # on its own line
        raise ValueError("no rule for\\n" + secret_b + "in step 0")
Net(4, 2)(torch.ones(3, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        (SCRIPTED, ["failed in the TorchScript interpreter", ", line 4, in scripted", "is invalid for"]),
        (INSPECTED, ["no rule for\nin step 0"]),
    ],
    ids=["scripted", "inspected"],
)
def test_no_message_of_an_exception_keeps_a_line_of_the_script(tmp_path: Path, script: str, kept: list[str]) -> None:
    (tmp_path / "train.py").write_text(script)
    messages = {}
    for policy in ("traceback", "none"):
        words = ["capture", "--on", "exception", "--no-cause", "--source", policy, "-o", f"{policy}.pt", "train.py"]
        done = run_python_in(tmp_path, "-m", "reprokit", *words)
        assert (tmp_path / f"{policy}.pt").exists(), done.stderr
        messages[policy] = (load(tmp_path / f"{policy}.pt").failure.exception or ("", ""))[1]
    assert any(line.strip() in messages["traceback"] for line in script.splitlines() if "secret" in line)
    left = {line.strip() for line in messages["none"].splitlines()}
    assert not left & {line.strip() for line in script.splitlines() if line.strip()}
    assert "secret" not in messages["none"]
    assert not [words for words in kept if words not in messages["none"]]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (  # from an archive, whose source is in no file of the run
            'it failed:\n  File "code/net.py", line 5, in f\ndef f(x):\n  a = g(x)\n   ~ <--- HERE\n  b = a\nError: 6',
            'it failed:\n  File "code/net.py", line 5, in f\nError: 6',
        ),
        (  # of Python 3.13, which shows all lines of a statement
            'from user code:\n   File "a.py", line 8, in f\n    x = g(\n        y)\n    ^^^^\n\nSet TORCH_LOGS',
            'from user code:\n   File "a.py", line 8, in f\n\nSet TORCH_LOGS',
        ),
        ("too few\nassert 3 == 7\n +  where 3 = len([a, b])", "too few\n"),
        ("I cannot assert that\n  x < 3", "I cannot assert that\n  x < 3"),
    ],
    ids=["script", "traceback", "pytest", "sentence"],
)
def test_source_that_a_message_marks_is_left_out(text: str, left: str) -> None:
    assert without_source(text) == left


@pytest.mark.slow
def test_every_text_of_every_field_is_private_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = import_benchmark("secrets_corpus")
    assert list(corpus.field_leaks()) == []
    assert sum(len(corpus.planted(cls)[1]) for cls in corpus.FILES) > 500
    for wrong, words in (("text", "a line of source in Failure.way"), ("code", "a line of source in Site.code")):
        kinds = {"text": (grammar.line,), "code": (grammar.code,)}[wrong]
        real = privacy._changed
        with monkeypatch.context() as patch:
            patch.setattr(privacy, "_changed", lambda kind, *rest: rest[0] if kind in kinds else real(kind, *rest))  # noqa: B023
            assert any(words in leak for leak in corpus.field_leaks())


def test_a_text_of_no_kind_is_an_error() -> None:
    @dataclass(frozen=True)
    class Forgotten:
        note: str = ""

    with pytest.raises(TypeError, match=r"`Forgotten.note` is a text of no kind"):
        grammar.text_fields(Forgotten)
    assert private(Forgotten("a line"), "none").note == ""  # as code: a capture is not lost


def test_a_quotation_leaves_a_sentence_that_still_says_where() -> None:
    operand = quoted("`w[0]`", "an operand")
    text = f"no gradient passes{quoted(': secret = a(x).detach()')}, at train.py:3; {operand} is 0"
    assert with_code(text) == "no gradient passes: secret = a(x).detach(), at train.py:3; `w[0]` is 0"
    assert without_code(text) == "no gradient passes, at train.py:3; an operand is 0"
    assert without_code(text[:30]) == "no gradient passes"  # a text that was cut shows no half of a quotation


# -- data --------------------------------------------------------------------------------------------------------------

VALUES = [0.1234567, -2.7182818, 3.1415926]


def reduction_of(program: Program, tensors: dict[int, torch.Tensor], snapshot: Snapshot) -> Reduction:
    """An unreduced reduction, so that recorded values are still in it."""
    found = shrink(snapshot, max_checks=1)
    return replace(found, program=program, tensors=tensors, failure=snapshot.failure, nearest=None)


def written(tmp_path: Path, program: Program, tensors: dict[int, torch.Tensor]) -> Path:
    """A snapshot and a reduction that kept its recorded values, beside each other."""
    snapshot = snapshot_of((program, tensors))
    save(snapshot, tmp_path / "snap.repro.pt")
    folder = tmp_path / "snap"
    folder.mkdir()
    reduction_of(program, tensors, snapshot).save(folder / "reduction.pt")
    return folder


@pytest.mark.parametrize("words", [[], ["--as", "issue"], ["--zip"]])
def test_nothing_is_written_with_recorded_numbers_if_none_may_be(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program((Call("torch.log", (Ref(0),), {}, Ref(1)),), (Input(0, "x"),), (Ref(1),))
    folder = written(tmp_path, program, {0: torch.tensor(VALUES)})
    assert main(["render", str(folder), "--no-data", *words, "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the repro needs recorded numbers (`x`), and --no-data writes none" in said
    assert "2.718" not in said and not (tmp_path / "out").exists()
    assert main(["render", str(folder)]) == 0
    assert "-2.718" in capsys.readouterr().out


def test_many_recorded_numbers_are_not_packed_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program((Call("torch.log", (Ref(0),), {}, Ref(1)),), (Input(0, "x"),), (Ref(1),))
    folder = written(tmp_path, program, {0: -torch.rand(100)})
    archive = tmp_path / "x.zip"
    assert main(["render", str(folder), "--zip", "-o", str(archive)]) == 2
    assert "100 recorded numbers" in capsys.readouterr().err and not archive.exists()
    assert main(["render", str(folder), "--zip", "--with-data", "-o", str(archive)]) == 0


def test_shrinking_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    program = Program((Call("torch.log", (Ref(0),), {}, Ref(1)),), (Input(0, "x"),), (Ref(1),))
    save(snapshot_of((program, {0: torch.tensor(VALUES)})), tmp_path / "snap.repro.pt")
    words = ["shrink", "snap.repro.pt", "--no-data", "--no-whatif", "-q"]
    assert main([*words, "--max-checks", "1"]) == 2
    assert "and --no-data writes none" in capsys.readouterr().err
    assert not Path("snap").exists()
    assert main(words) == 0
    texts = [file.read_text() for file in Path("snap").iterdir() if file.suffix != ".pt"]
    assert len(texts) == 5 and "1234567" not in "".join(texts)  # ranges of the step are in the report
