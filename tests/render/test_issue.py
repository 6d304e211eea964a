"""The issue: what it expects, whose code it blames, every template, its limits, and how it is handed over."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

from reprokit.cli import main
from reprokit.errors import UsageError
from reprokit.program.ir import Call, Input, Mode, Program, Ref, Site
from reprokit.render.expectation import expect
from reprokit.render.facts import Facts
from reprokit.render.issue import MAX_CHARACTERS, Issue, make_issue
from reprokit.render.script import Script
from reprokit.render.sources import snapshot_script
from reprokit.render.templates import find_template, template_names
from reprokit.render.texts import write_zip
from reprokit.rules.match import diagnose
from reprokit.shrink.checks.check import Signed
from reprokit.shrink.reduction import Reduction, Size
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.format import Snapshot, save
from reprokit.snapshot.source import SourceState
from tests.conftest import run_few_times
from tests.locate.mechanisms import NAN, sgd
from tests.render.programs import (
    VERIFIED,
    failing_cholesky,
    masked_softmax,
    snapshot_of,
)
from tests.shrink import models

INF = float("inf")
F = "torch.nn.functional"
HEADINGS = {
    "generic": [],
    "pytorch": ["### 🐛 Describe the bug", "### Versions"],
    "transformers": [
        "### System Info",
        "### Who can help?",
        "### Information",
        "### Tasks",
        "### Reproduction",
        "### Expected behavior",
    ],
    "lightning": [
        "### Bug description",
        "### What version are you seeing the problem on?",
        "### Reproduced in studio",
        "### How to reproduce the bug",
        "### Error messages and logs",
        "### Environment",
        "### More info",
    ],
}


def one_call(
    target: str, *values: Any, dtype: torch.dtype = torch.float32, gradient: Any = None, **kwargs: Any
) -> Snapshot:
    """A step of one call on tensors (lists) and constants, with a backward pass when a gradient is given."""
    tensors: dict[int, torch.Tensor] = {}
    arguments: list[Any] = []
    for value in values:
        is_tensor = isinstance(value, (list, torch.Tensor))
        arguments.append(Ref(len(tensors)) if is_tensor else value)
        if is_tensor:
            tensors[len(tensors)] = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
    inputs = [Input(number, f"x{number}", requires_grad=gradient is not None) for number in tensors]
    calls = [Call(target, tuple(arguments), kwargs, Ref(50), site=Site("train.py", 7, "y = f(x)"))]
    if gradient is not None:
        tensors[60] = torch.tensor(gradient, dtype=dtype)
        inputs.append(Input(60, "gradient", role="gradient"))
        calls.append(Call("torch.Tensor.backward", (Ref(50), Ref(60)), phase="backward"))
    return snapshot_of((Program(tuple(calls), tuple(inputs), (Ref(50),)), tensors))


def reduction_of(snapshot: Snapshot, **fields: Any) -> Reduction:
    """A reduction that is the snapshot itself."""
    program, tensors = snapshot.program, dict(snapshot.tensors)
    return Reduction(program, tensors, snapshot.failure, Size(1, 1), Signed("forward", "nan"), **fields)


# -- what is expected --------------------------------------------------------------------------------------------------

LAST = {"dim": -1}


def diagnosed(snapshot: Snapshot, **fields: Any) -> Reduction:
    """A reduction that is the snapshot itself, with its diagnosis."""
    return reduction_of(snapshot, diagnosis=diagnose(snapshot), **fields)


@pytest.mark.parametrize(
    ("snapshot", "needs"),
    [
        (lambda: one_call("torch.log", [-1.0]), "an argument above zero"),
        (lambda: one_call("torch.Tensor.div", [0.0], [0.0]), "a divisor that is never zero"),
        (lambda: one_call("torch.nn.functional.softmax", [[0.0, 1.0], [-INF, -INF]], **LAST), "a finite score in"),
        (lambda: one_call("torch.matmul", [300.0], [300.0], dtype=torch.float16), "operands small enough"),
        (lambda: one_call("torch.sqrt", [0.0], gradient=[0.0]), "an argument away from zero"),
        (sgd(NAN, grad=1.0), "a number that is finite"),
    ],
)  # fmt: skip
def test_a_function_that_does_what_it_is_defined_to_do(snapshot: Any, needs: str) -> None:
    made = snapshot()
    found = expect(made, diagnosed(made))
    assert (found.owner, found.template) == ("own", "generic")
    assert f", which needs {needs}" in found.expected and "does what it is defined to do" in found.expected
    assert "rather than PyTorch" in found.remark


def test_an_eps_of_torch_that_rounds_to_zero_goes_upstream() -> None:
    snapshot = one_call(f"{F}.normalize", [[0.0]], dtype=torch.float16)
    found = expect(snapshot, diagnosed(snapshot))
    assert (found.owner, found.template, found.remark) == ("torch", "pytorch", "")
    assert found.expected.startswith("A finite") and "eps" in found.expected


@pytest.mark.parametrize(
    ("file", "template"),
    [
        ("transformers/models/t5/modeling_t5.py", "transformers"),
        ("lightning/pytorch/loops/fit.py", "lightning"),
        ("pytorch_lightning/loops.py", "lightning"),
        ("torch_geometric/nn/conv.py", "generic"),
    ],
)
def test_code_of_a_library_goes_to_the_library(file: str, template: str) -> None:
    snapshot = one_call("torch.log", [-1.0])
    site = Site("train.py", 7, "model(x)", "main", (file, 99))
    snapshot = replace(snapshot, failure=replace(snapshot.failure, site=site))
    found = expect(snapshot, diagnosed(snapshot))
    assert found.template == template and f"`{file.split('/')[0]}`" in found.remark


def test_exceptions_are_the_callers_unless_torch_says_otherwise() -> None:
    snapshot = snapshot_of(failing_cholesky())
    assert expect(snapshot).template == "generic"
    internal = replace(snapshot.failure, exception=("RuntimeError", "x INTERNAL ASSERT FAILED at y"))
    assert expect(replace(snapshot, failure=internal)).template == "pytorch"


REFUSED = ("RuntimeError", "Input batch size 10 doesn't match hidden0 batch size 16")


@pytest.mark.parametrize(
    ("exception", "refuses"),
    [
        (REFUSED, True),
        (("IndexError", "index out of range in self"), True),
        (("RuntimeError", "expected scalar type INTERNAL ASSERT FAILED, Please report"), False),
        (("NotImplementedError", "\"gamma\" not implemented for shape 'Half'"), False),
        (("RuntimeError", "CUDA error: device-side assert triggered, index out of bounds"), False),
        (("RuntimeError", "Expected all tensors to be on one device (mat1 in method wrapper_CUDA_addmm)"), True),
        (("RuntimeError", "the kernel has failed"), False),
    ],
)
def test_a_refusal_is_told_from_a_defect(exception: tuple[str, str], refuses: bool) -> None:
    snapshot = snapshot_of(failing_cholesky())
    found = expect(replace(snapshot, failure=replace(snapshot.failure, exception=exception)))
    assert ("does what it is defined to do: it refuses" in found.expected) is refuses
    assert (
        found.remark == "Why it is given these values is a question about the training code rather than PyTorch."
    ) is (refuses)


def test_the_message_that_training_had_is_quoted_beside_the_reduced_one() -> None:
    reduced = snapshot_of(failing_cholesky())
    recorded = replace(reduced, failure=replace(reduced.failure, exception=REFUSED))
    said = "In training it was: `Input batch size 10 doesn't match hidden0 batch size 16`."
    assert expect(recorded, reduction_of(reduced)).observed.endswith(f"`. {said}")
    assert "In training" not in expect(reduced, reduction_of(reduced)).observed


def test_the_title_says_that_training_ran_under_autocast() -> None:
    snapshot = one_call("torch.log", [-1.0])
    call = replace(snapshot.program.calls[0], mode=Mode(autocast=(("cpu", "torch.bfloat16"),)))
    recorded = replace(snapshot, program=replace(snapshot.program, calls=(call,)))
    assert "(float32, bfloat16 autocast in training, CPU" in title_of(recorded, reduction_of(snapshot))
    assert "(autocast to bfloat16, CPU" in title_of(recorded)


def test_the_title_says_that_the_call_was_given_another_dtype_in_training() -> None:
    snapshot = one_call("torch.log", [-1.0])
    half = replace(snapshot, tensors={value: tensor.half() for value, tensor in snapshot.tensors.items()})
    assert "(float32, float16 in training, CPU" in title_of(half, reduction_of(snapshot))
    assert "in training" not in title_of(snapshot, reduction_of(snapshot))


# -- templates ---------------------------------------------------------------------------------------------------------


def title_of(snapshot: Snapshot, reduction: Reduction | None = None) -> str:
    return Facts(snapshot, snapshot_script(snapshot), VERIFIED, reduction).title


def issue_of(snapshot: Snapshot, template: str | None = None, **fields: Any) -> Issue:
    return make_issue(Facts(snapshot, snapshot_script(snapshot), replace(VERIFIED, **fields)), template=template)


def test_every_template_has_its_headings_and_all_sections() -> None:
    assert sorted(HEADINGS) == template_names()
    snapshot = snapshot_of(masked_softmax(), environment=Environment(torch="2.13.0+cpu", collect_env="OS: Linux"))
    for template, headings in HEADINGS.items():
        text = issue_of(snapshot, template).text
        assert re.findall(r"(?m)^### .*$", text) == headings
        heading = "softmax returns nan (float32, CPU, torch 2.13.0)"
        assert text.startswith(f"<!-- Title: {heading} -->\n")
        for part in (
            "**Observed:**",
            "```python",
            "python repro.py",
            "failed 20 of 20",
            "own words",
            "mechanically",
            "OS: Linux",
        ):
            assert part in text, (template, part)
        assert "A finite result" in text and "\n\n\n" not in text
        assert text.count("<details>") == text.count("</details>") >= 1


def test_the_markdown_is_what_it_looks_like() -> None:
    hostile = "out = '```'\n</details>\n| a | b |\n````"
    text = issue_of(snapshot_of(masked_softmax()), "pytorch", output=hostile, error_output=hostile).text
    tokens = MarkdownIt("commonmark", {"html": True}).parse(text)
    fences = [token for token in tokens if token.type == "fence"]
    assert [token.info for token in fences][:2] == ["python", "text"]
    assert fences[1].content == hostile + "\n"
    blocks = "".join(token.content for token in tokens if token.type == "html_block")
    assert blocks.count("<details>") == blocks.count("</details>") == 2


def test_a_long_script_is_folded() -> None:
    snapshot = snapshot_of(masked_softmax())
    script = replace(snapshot_script(snapshot), text="import torch\n" + "x = 1\n" * 50)
    screen = make_issue(Facts(snapshot, script, VERIFIED)).text.partition("<details>")[0]
    assert "x = 1" not in screen and "longer than a screen" in screen


@pytest.mark.parametrize("template", sorted(HEADINGS))
def test_the_limit_holds_and_the_cut_shows(template: str) -> None:
    snapshot = snapshot_of(masked_softmax(), environment=Environment(torch="2.13.0", collect_env="y" * 80_000))
    text = issue_of(snapshot, template, error_output="`" * 90_000).text
    assert len(text) <= MAX_CHARACTERS
    assert "... cut here" in text and text.count("<details>") == text.count("</details>")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("fine\n{% if %}\n", r"error in the template `mine.j2`, line 2: Expected an expression"),
        ("fine\n\n{{ nothing }}\n", r"error in the template `mine.j2`, line 3: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", r"error in the template `mine.j2`, line 1: division by zero"),
        ("a\n{% include 'gone.j2' %}", r"error in the template `mine.j2`, line 2: there is no template `gone.j2`"),
        ("{{ title.__class__.__mro__ }}", r"error in the template `mine.j2`, line 1: access to attribute '__class__'"),
        (b"\xff\xfe", r"error in the template `mine.j2`: 'utf-8' codec"),
    ],
)
def test_an_error_in_a_users_template_is_one_line(
    tmp_path: Path, content: str | bytes, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "mine.j2", tmp_path / "issue.md"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    save(snapshot_of(masked_softmax()), tmp_path / "snap.pt")
    assert main(["render", str(tmp_path / "snap.pt"), "--template", str(file), "-o", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and re.match(f"reprokit: error: {complaint}", said[0]) and not out.exists()


def test_a_folder_of_templates(tmp_path: Path) -> None:
    (tmp_path / "_part.j2").write_text("{{ observed }}")
    snapshot = snapshot_of(masked_softmax())
    with pytest.raises(UsageError, match="has no `issue"):
        find_template(str(tmp_path))
    (tmp_path / "ours.j2").write_text("{% include '_part.j2' %}|{% include 'issue/generic.md.j2' %}")
    text = issue_of(snapshot, str(tmp_path)).text
    assert text.startswith("`torch.nn.functional.softmax` returns nan") and "**Expected:**" in text
    (tmp_path / "issue.md.j2").write_text("mine: {{ title }}")
    assert issue_of(snapshot, str(tmp_path)).text.startswith("mine: softmax returns nan (")


# -- handing over ------------------------------------------------------------------------------------------------------


def test_the_users_own_repository_is_known_from_its_remote() -> None:
    for remote in ("https://github.com/ada/engine.git", "git@github.com:ada/engine.git"):
        snapshot = replace(one_call("torch.log", [-1.0]), source=SourceState(remote=remote))
        assert issue_of(snapshot).repository == "ada/engine"
    assert issue_of(replace(snapshot, source=SourceState(remote="https://example.org/ada/engine"))).repository is None


def test_a_zip_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    issue = issue_of(snapshot_of(masked_softmax()))
    script = Script("import torch\n", {"x": torch.arange(8.0)})
    first, second = (write_zip(tmp_path / name, script, issue).read_bytes() for name in ("a.zip", "b.zip"))
    assert first == second and b"repro_inputs.pt" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "b.zip"]


@pytest.mark.slow
def test_the_command_line_writes_and_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save(one_call("torch.log", [-1.0]), Path("snap.repro.pt"))
    assert main(["render", "snap.repro.pt", "--zip"]) == 0
    assert Path("snap.zip").is_file()
    assert "nothing was sent; add your own words to the text, and post it at " in capsys.readouterr().err
    assert main(["render", "snap.repro.pt", "--zip"]) == 2  # it exists
    capsys.readouterr()
    assert main(["render", "snap.repro.pt", "--as", "issue", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["title"] == "log returns nan at train.py:7 (float32, CPU, torch 2.13.0)"
    assert main(["render", "snap.repro.pt", "--as", "report", "--zip"]) == 2
    assert main(["render", "snap.repro.pt", "--zip", "--no-data", "--with-data"]) == 2


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a snapshot and, under another name, the results of shrinking it; these have a context."""
    folder = tmp_path_factory.mktemp("attention")
    save(models.masked_attention(), folder / "snap.pt")
    with pytest.MonkeyPatch.context() as patch:
        run_few_times(patch)
        assert main(["shrink", str(folder / "snap.pt"), "--no-whatif", "-q", "-o", str(folder / "out")]) == 0
    assert (folder / "out" / "repro_module.py").is_file()
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("few_runs")
def test_a_zip_holds_the_piece_of_the_model(attention: Path, tmp_path: Path) -> None:
    assert main(["render", str(attention / "out"), "--zip", "-q", "-o", str(tmp_path / "x.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert sorted(archive.namelist()) == ["issue.md", "repro.py", "repro_module.py"]
        for name in archive.namelist():
            assert archive.read(name) == (attention / "out" / name).read_bytes()


def test_the_snapshot_is_found_by_the_name_it_was_shrunk_under(attention: Path, capsys: Any, tmp_path: Path) -> None:
    assert main(["render", str(attention / "out"), "--as", "report", "-q", "-o", str(tmp_path / "r.html")]) == 0
    shutil.copytree(attention / "out", tmp_path / "elsewhere")
    assert main(["render", str(tmp_path / "elsewhere"), "--as", "issue"]) == 2
    error, hint, note = capsys.readouterr().err.splitlines()[-3:]
    assert error.endswith("holds a reduction, and the snapshot it came from is not beside it")
    assert hint == "hint: name what `reprokit shrink` was given: --snapshot snap.pt"
    assert note == f"note: looked for `snap.pt` and other *.repro.pt in `{tmp_path}`"
    given = ["--snapshot", str(attention / "snap.pt")]
    assert main(["render", str(tmp_path / "elsewhere"), "--as", "issue", *given]) == 0


def test_a_snapshot_that_does_not_belong_is_refused(attention: Path, capsys: Any, tmp_path: Path) -> None:
    save(one_call("torch.log", [-1.0]), tmp_path / "log.pt")
    assert main(["render", str(attention / "out"), "--snapshot", str(tmp_path / "log.pt")]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "was not made from" in error and hint.endswith("; that was `snap.pt`")
    assert main(["render", str(tmp_path / "log.pt"), "--snapshot", str(attention / "snap.pt")]) == 2
    assert "is a snapshot already" in capsys.readouterr().err
