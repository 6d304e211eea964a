"""Warnings under capture are those of a bare run: category, message, file, line, module and count.

They come from C++ and from Python, of functions of torch, modules, optimizers, backward passes, loaders and clipping,
under every way to filter and to show them. The script prints what it is shown; both runs print the same.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from pathlib import Path

import pytest

from reprokit.own_work import ignored_warnings
from tests.conftest import ROOT, Run

SCRIPT = """
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

HOW = sys.argv[1]
if HOW == "shown":
    def show(message, category, filename, lineno, file=None, line=None):
        print("SHOWN", category.__name__, str(message)[:60], filename.rpartition("/")[2], lineno)

    warnings.showwarning = show
elif HOW == "always":
    warnings.simplefilter("always")
elif HOW == "module":
    warnings.filterwarnings("ignore", module="__main__")
    warnings.filterwarnings("always", module="torch")
elif HOW == "once":
    warnings.simplefilter("once")


class Warns(nn.Module):
    def __init__(self, level):
        super().__init__()
        self.layer, self.level = nn.Linear(4, 1), level

    def __call__(self, x):
        warnings.warn(f"own call, level {self.level}", stacklevel=self.level)
        return super().__call__(x)

    def forward(self, x):
        warnings.warn("in forward", stacklevel=1)
        return self.layer(x)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        warnings.warn("a sample", DeprecationWarning, stacklevel=1)
        return torch.full((4,), index / 16)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        warnings.warn("in a custom function", stacklevel=2)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Double(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        warnings.warn("in an optimizer", stacklevel=2)
        return super().step()


def helper(x):
    return F.mse_loss(x.squeeze(-1), x.sum(1, keepdim=True))  # a Python function of torch: level 2


def warned(step, x):
    out = models[0](x) + models[1](x)
    loss = helper(out) + F.l1_loss(out.squeeze(-1), out)
    loss = loss + F.softmax(out).sum()  # a helper inside of it: level 3
    loss = loss + F.interpolate(out[None, None], scale_factor=1.5, recompute_scale_factor=True).mean()
    loss = loss + torch.std(out[:1]) * 0 if step == 9 else loss + torch.var(out[:1].detach()).nan_to_num()  # C++
    loss = loss + torch.tensor(out.detach().mean())  # C, names the line
    loss.grad  # of C++: not a leaf
    float(loss)  # of C++: needs a gradient
    loss = loss + Cubed.apply(out).mean()
    return loss


torch.manual_seed(0)
models = [Warns(2), Warns(1)]
parameters = [p for model in models for p in model.parameters()]
optimizer = Double(parameters, lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scheduler.step()  # before the optimizer: a warning of torch about the order


def train():
    for step, x in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4)):
        def closure():
            optimizer.zero_grad()
            loss = warned(step, x)
            loss.backward(create_graph=step == 3)
            warnings.warn("in a closure", stacklevel=2)
            return loss

        if step % 2:
            optimizer.step(closure)
        else:
            loss = warned(step, x)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(iter([]), 1.0)
            optimizer.step()
        if step == 1:
            torch.jit.trace(models[0].layer, x)
        print(step, loss.item())


if HOW == "error":
    for number in range(6):
        try:
            train()
        except Warning as error:
            print(type(error).__name__, str(error)[:80])
            warnings.filterwarnings("ignore", message=str(error)[:12])
elif HOW == "record":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    for item in caught:
        print(item.category.__name__, str(item.message)[:60], item.filename.rpartition("/")[2], item.lineno)
    train()
else:
    train()
print(sorted(name for name in globals().get("__warningregistry__", {}) if name != "version"))
"""


@pytest.mark.parametrize("how", ["default", "shown", "always", "module", "once", "record"])
@pytest.mark.parametrize("on", ["nonfinite", "early"])
def test_warnings_are_those_of_a_bare_run(how: str, on: str, run_python: Run, run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(SCRIPT)
    bare = run_python("train.py", how)
    watched = run_reprokit("capture", "--on", on, "--on", "silent", "train.py", how)
    assert bare.returncode == watched.returncode == 0, bare.stderr + watched.stderr
    assert watched.stdout == bare.stdout
    assert _without_own(watched.stderr) == bare.stderr.splitlines()


@pytest.mark.parametrize("words", [("-W", "error"), ("-W", "always"), ("-W", "error::DeprecationWarning")])
def test_options_of_python_hold(words: tuple[str, ...], start_python: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(SCRIPT)
    how = "error" if "error" in words else "default"
    bare = start_python(*words, "train.py", how)
    watched = start_python(*words, "-m", "reprokit", "capture", "--after-capture", "continue", "train.py", how)
    assert watched.stdout == bare.stdout, watched.stderr
    assert watched.returncode == bare.returncode
    if how == "default" and bare.returncode == 0:
        assert _without_own(watched.stderr) == bare.stderr.splitlines()


@pytest.mark.parametrize("options", [(), ("--watch", "every-step", "--on", "early", "--at-step", "2")])
@pytest.mark.parametrize("words", [(), ("scaled",)])
def test_warnings_name_the_same_frame_at_every_level(
    options: tuple[str, ...], words: tuple[str, ...], run_python: Run, run_reprokit: Run
) -> None:
    script = str(ROOT / "tests" / "harmless" / "warning_levels.py")
    bare = run_python(script, *words)
    watched = run_reprokit("capture", "--after-capture", "continue", *options, script, *words)
    assert bare.returncode == watched.returncode == 0, watched.stderr
    assert len(bare.stdout.splitlines()) > 300
    assert watched.stdout.splitlines() == bare.stdout.splitlines()


def test_own_work_hides_no_warning_of_another_thread() -> None:
    def warn() -> None:
        warnings.warn("of another thread", stacklevel=1)

    before = list(warnings.filters)  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ignored_warnings():
            warnings.warn("of our own", stacklevel=1)
            thread = threading.Thread(target=warn)
            thread.start()
            thread.join()
    assert [str(item.message) for item in caught] == ["of another thread"]
    assert list(warnings.filters) == before  # type: ignore[attr-defined]


def test_own_work_forgets_no_warning_that_was_shown() -> None:
    space: dict[str, object] = {"__name__": "shown_once"}
    code = compile("import warnings\nwarnings.warn('once', UserWarning)", "shown_once.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exec(code, space)
        with ignored_warnings():
            exec(code, space)
        exec(code, space)
    assert len(caught) == 1


SHOWN_ONCE = """
import sys
import warnings

import torch
from torch import nn

warnings.simplefilter("default")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        warnings.warn("in forward", stacklevel=1)
        with warnings.catch_warnings():
            if not quiet:
                warnings.simplefilter("always")
                warnings.warn("always", stacklevel=1)
        return self.layer(x)


class Plain(Net):
    def forward(self, x):
        warnings.warn("in forward", stacklevel=1)
        return self.layer(x)


quiet = "quiet" in sys.argv
net = Plain() if "plain" in sys.argv else Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
before = warnings.filters, warnings.filters[:]
for step in range(12):
    x = torch.full((2, 4), float("nan") if step == 9 and "bad" in sys.argv else 1.0)
    loss = net(x).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warnings.warn("in the loop", stacklevel=1)
    registry = {key: value for key, value in __warningregistry__.items() if key != "version"}
    print(step, sorted(map(str, registry)), warnings.filters is before[0], warnings.filters == before[1])
"""


@pytest.mark.parametrize("words", [("plain",), ("plain", "bad"), ("all", "bad"), ("quiet",)])
def test_what_was_shown_once_is_not_shown_again(
    words: tuple[str, ...], run_python: Run, run_reprokit: Run, tmp_path: Path
) -> None:
    """A save reads the commit and writes files: Python's `subprocess` uses `catch_warnings` to start a process."""
    (tmp_path / "train.py").write_text(SHOWN_ONCE)
    options = ("--at-step", "3,6", "--on", "early", "--on", "silent", "--after-capture", "continue")
    bare = run_python("train.py", *words)
    watched = run_reprokit("capture", *options, "train.py", *words)
    assert bare.returncode == watched.returncode == 0, bare.stderr + watched.stderr
    assert len(list(tmp_path.glob("*.pt"))) >= 2
    assert watched.stdout == bare.stdout
    assert _without_own(watched.stderr) == bare.stderr.splitlines()


def test_own_work_is_unseen_by_code_that_reads_the_filters() -> None:
    filters, copies = warnings.filters, []  # type: ignore[attr-defined]
    before = list(filters)
    outer = warnings.catch_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        inside = warnings.filters  # type: ignore[attr-defined]
        content = list(inside)
        with ignored_warnings():
            copies += [warnings.filters[:], warnings.filters]  # type: ignore[attr-defined]
            assert all(list(copy) == content == copy and len(copy) == len(content) for copy in copies)
            assert pickle.loads(pickle.dumps(copies[0])) == content
            outer.__enter__()
            warnings.simplefilter("always")
            warnings.warn("of a step that is played again", stacklevel=1)
            with warnings.catch_warnings(record=True) as recorded:
                warnings.simplefilter("always")
                warnings.warn("read by that step", stacklevel=1)
        assert warnings.filters is inside and content == inside  # type: ignore[attr-defined]
        outer.__exit__(None, None, None)
        assert content == warnings.filters  # type: ignore[attr-defined]
        warnings.warn("shown", stacklevel=1)
    assert [str(item.message) for item in recorded] == ["read by that step"]
    assert [str(item.message) for item in caught] == ["shown"]
    assert warnings.filters is filters and list(filters) == before  # type: ignore[attr-defined]


def test_catch_warnings_that_ends_inside_of_own_work_leaves_its_own_filters() -> None:
    before = list(warnings.filters)  # type: ignore[attr-defined]
    outer = warnings.catch_warnings()
    outer.__enter__()
    warnings.simplefilter("always")
    with ignored_warnings():
        outer.__exit__(None, None, None)
    assert list(warnings.filters) == before and type(warnings.filters) is list  # type: ignore[attr-defined]


def test_filters_that_another_thread_sets_meanwhile_stay() -> None:
    with warnings.catch_warnings():
        inside = warnings.filters  # type: ignore[attr-defined]
        with ignored_warnings():
            warnings.filterwarnings("error", "of this thread")
            thread = threading.Thread(target=warnings.filterwarnings, args=("error", "of another thread"))
            thread.start()
            thread.join()
        assert warnings.filters is inside  # type: ignore[attr-defined]
        assert [rule[1].pattern for rule in inside if rule[0] == "error" and rule[1]] == ["of another thread"]


def _without_own(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("reprokit:")]
