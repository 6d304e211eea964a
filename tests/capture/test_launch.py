"""``python X`` and ``python -m reprokit capture X`` differ in nothing that a script or its caller can see."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from reprokit.capture import launch
from tests.conftest import Run

SCRIPTS = {
    "names": """
        import sys
        print(__name__, __file__, __package__, __spec__, __doc__, __cached__, __annotations__)
        print(type(__loader__).__name__, __builtins__, sorted(globals()))
        print(sys.argv, sys.path, sys.modules["__main__"].__dict__ is globals())
    """,
    "many_things": """
        import argparse, atexit, inspect, pickle, threading, time, warnings
        import beside
        class Point:
            def __init__(self, x: int):
                self.x = x
        def main():
            print("main ran", inspect.getsource(main), inspect.getfile(main), len(inspect.stack()) > 0)
        def work():
            time.sleep(0.2)
            print("worker done")
        if __name__ == "__main__":
            main()
        parser = argparse.ArgumentParser()
        parser.add_argument("words", nargs="*")
        parser.add_argument("-o", "--output")
        parser.add_argument("--json", action="store_true")
        print(parser.parse_args(), beside.VALUE, beside.__file__, Point.__init__.__annotations__)
        text = pickle.dumps(Point(3))
        print(pickle.loads(text).x, Point.__module__, text)
        atexit.register(lambda: print(len(pickle.dumps(Point(1))) > 0, __name__))
        warnings.warn("careful")
        threading.Thread(target=work).start()
        try:
            open("nowhere")
        except OSError as error:
            raise RuntimeError("no data") from error
        finally:
            print("cleaned up")
    """,
    "exit_text": "import sys; sys.exit('no data')",
    "exception": """
        def outer(x):
            return inner(x)
        def inner(x):
            return 1 / x
        print("before")
        outer(0)
    """,
    "syntax_error": "print('never')\nif True print(1)",
    "keyboard_interrupt": "raise KeyboardInterrupt",
    "atexit": """
        import atexit, sys
        atexit.register(print, "goodbye")
        sys.exit(3)
    """,
    "excepthook": """
        import sys
        def hook(kind, value, traceback):
            depth = 0
            while traceback is not None:
                depth, traceback = depth + 1, traceback.tb_next
            print("hook", kind.__name__, value, depth)
        sys.excepthook = hook
        def fail():
            raise ValueError("x")
        fail()
    """,
    "environment_before_torch": """
        import os, sys
        assert "torch" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        print(torch.get_num_threads(), torch.__spec__.loader.__class__.__name__, vars(torch.__spec__.loader))
    """,
    "torch_error": """
        import torch
        import torch.nn.functional as F
        def loss_of(x):
            return F.cross_entropy(x, torch.tensor([7]))
        x = torch.zeros(1, 3, requires_grad=True)
        loss_of(x)
    """,
    "workers": """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return torch.tensor(index**2)
        if __name__ == "__main__":
            loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
            for batch in loader:
                print(batch.tolist())
    """,
    "training": """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(5):
            loss = model(torch.randn(4, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item().hex())
        print([p.sum().item().hex() for p in model.parameters()], torch.rand(1).item())
    """,
}

FORKED = {"training"}  # the others do as much at a start of Python


def outcome(result: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr without the tool's own first line and its closing line.

    What multiprocessing's resource tracker says is left out: it is a process of its own, and on a busy machine it may
    complain about a semaphore of a spawned worker, with reprokit and without.
    """
    own = ("reprokit: watching ", "reprokit: nothing was saved: ")
    lines = [line for line in result.stderr.splitlines() if not line.startswith(own)]
    lines = [line for line in lines if "resource_tracker" not in line]
    return result.returncode, result.stdout, "\n".join(lines)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_under_python(name: str, start_python: Run, run_python: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "folder" / "script.py").write_text(dedent(SCRIPTS[name]).lstrip("\n"))
    words = ["./folder/script.py", "--json", "-o", "x", "--", "-q"]
    run = run_python if name in FORKED else functools.partial(start_python, OMP_NUM_THREADS="")
    expected = run(*words)
    only = ("--on", "nonfinite") if name == "torch_error" else ()  # otherwise a failure to be captured
    actual = run("-m", "reprokit", "capture", *only, *words)
    assert outcome(actual) == outcome(expected)
    assert actual.stderr.startswith("reprokit: watching ")


def test_quiet_adds_nothing_at_all(start_python: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(1)\nprint(2, file=sys.stderr)\n")
    result = start_python("-m", "reprokit", "capture", "-q", "script.py")
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "2\n")


MODULES = {
    "package": {
        "package/__init__.py": "print('package', __name__)",
        "package/__main__.py": "from . import part\nimport sys\nprint(__name__, __spec__.name, sys.argv, sys.path[0])",
        "package/part.py": "print(__name__)",
    },
    "package.part": {
        "package/__init__.py": "",
        "package/part.py": "import sys\nprint(__file__, __package__, __spec__.name, sys.argv, sys.path)\nsys.exit(4)",
    },
    "single": {"single.py": "import pickle\nclass A: pass\nprint(pickle.dumps(A()), __package__ == '', __cached__)"},
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_runs_as_under_python(name: str, start_python: Run, tmp_path: Path) -> None:
    for path, text in MODULES[name].items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    expected = start_python("-m", name, "a", "--b")
    actual = start_python("-m", "reprokit", "capture", "-m", name, "a", "--b")
    assert outcome(actual) == outcome(expected)


@pytest.mark.parametrize(
    ("words", "script", "ending"),
    [
        (["-m", "failing"], "def f():\n    raise ValueError('x')\nf()\n", "ValueError: x\n"),
        (
            ["failing.py"],
            "import sys\nsys.excepthook = None\nraise ValueError('the cause')\n",
            "ValueError: the cause\n",
        ),
        (["failing.py"], "print('never')\n\0", "SyntaxError: source code string cannot contain null bytes\n"),
    ],
)
def test_an_error_is_shown_with_frames_of_the_script_only(
    words: list[str], script: str, ending: str, start_python: Run, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(script)
    result = start_python("-m", "reprokit", "capture", "-q", *words)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith(ending) and "reprokit" not in result.stderr.rpartition("Traceback")[2]


def test_a_module_whose_import_fails_is_told_apart_from_one_that_is_missing(start_python: Run, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import no_such_dependency\n")
    (tmp_path / "package" / "__main__.py").write_text("")
    result = start_python("-m", "reprokit", "capture", "-q", "-m", "package")
    assert result.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_dependency'" in result.stderr


@pytest.mark.parametrize("flag", ["-P", "-I"])
def test_a_safe_path_stays_safe(flag: str, start_python: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(sys.path)\n")
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({root!r}); from reprokit.cli import main; main(['capture', '-q', 'script.py'])"
    expected = start_python(flag, "script.py").stdout
    actual = start_python(flag, "-c", code).stdout
    assert actual.replace(f", {root!r}]", "]") == expected


def test_interrupting_ends_as_under_python(start_python: Run, tmp_path: Path) -> None:
    script = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "script.py").write_text(script)
    expected = start_python("script.py")
    actual = start_python("-m", "reprokit", "capture", "script.py")
    assert expected.returncode == -2
    assert outcome(actual) == outcome(expected)


# -- the moment when a module is imported ---------------------------------------------------------------------------

ASKING = {
    "asked_twice": "import importlib.util as u; u.find_spec('awaited'); u.find_spec('awaited'); import awaited",
    "failing_first": """
        import os
        os.environ["AWAITED_FAILS"] = "1"
        try:
            import awaited
        except ImportError:
            assert calls == []
        del os.environ["AWAITED_FAILS"]
        import awaited
    """,
}


@pytest.mark.parametrize("name", ASKING)
def test_an_import_is_noticed_however_it_was_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs ask whether torch is installed before they import it; only the import counts, and counts once."""
    package = tmp_path / "awaited"
    package.mkdir()
    source = "import os\nif os.environ.get('AWAITED_FAILS'): import nothing_at_all\nVALUE = 1\n"
    package.joinpath("__init__.py").write_text(source)
    package.joinpath("part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, calls = list(sys.meta_path), list[str]()
    launch.when_imported("awaited", lambda: calls.append(sys.modules["awaited"].VALUE))
    try:
        exec(dedent(ASKING[name]), {"calls": calls})
        assert (calls, sys.meta_path) == ([1], finders)
        assert "exec_module" not in vars(sys.modules["awaited"].__spec__.loader)  # type: ignore[union-attr]
    finally:
        for known in ("awaited", "awaited.part"):
            sys.modules.pop(known, None)


@pytest.mark.parametrize("first", ["import importlib.util; importlib.util.find_spec('torch')", "import transformers"])
def test_a_script_that_asks_for_torch_first_is_watched(first: str, start_reprokit: Run, tmp_path: Path) -> None:
    if "transformers" in first:
        pytest.importorskip("transformers")
    loop = "import torch\nw = torch.zeros(1, requires_grad=True)\n(w / w).sum().backward()\nw.data -= w.grad\n"
    (tmp_path / "script.py").write_text(f"{first}\n{loop}")
    result = start_reprokit("capture", "script.py")
    assert result.returncode == 3 and "captured nan from" in result.stderr
