"""``__call__`` of a module is what Python finds without reprokit, in every shape of inheritance.

Each script prints numbers that depend on which ``__call__`` ran, and is run bare and under capture.
"""

from __future__ import annotations

import textwrap

import pytest
import torch

import reprokit
from tests.conftest import Run

LOOP = """
torch.manual_seed(0)
optimizer = torch.optim.Adam([p for model in models for p in model.parameters()], lr=0.01)
for step in range(6):
    between = globals().get("between_steps")
    if between is not None:
        between(step)
    x = torch.randn(8, 3)
    out = sum(model(x) for model in models)
    loss = (out - x.sum(-1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), SEEN)
    SEEN.clear()
print([name for cls in CLASSES for name in vars(cls) if name == "__call__"])
"""
HEAD = """
import torch
from torch import nn

SEEN = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        SEEN.append("forward")
        return self.net(x)
"""
CONTEXT = """
class Context(nn.Module):
    inside = 0

    def __call__(self, *args):
        SEEN.append("context")
        Context.inside += 1
        try:
            return super().__call__(*args) * Context.inside
        finally:
            Context.inside -= 1
"""
SHAPES = {
    "a context around the call, as PyroModule has": CONTEXT
    + """
class Model(Context, Net):
    def forward(self, x):
        return super().forward(x) * Context.inside

CLASSES = [Context, Net, Model]
models = [Model(), Model()]
""",
    "a mixin that is no module": """
class Scaled:
    def __call__(self, *args):
        SEEN.append("mixin")
        return 2 * super().__call__(*args)

class Model(Scaled, Net):
    pass

CLASSES = [Scaled, Model]
models = [Model()]
""",
    "a diamond": """
class Left(Net):
    def __call__(self, x):
        SEEN.append("left")
        return super().__call__(x) + 1

class Right(Net):
    def __call__(self, x):
        SEEN.append("right")
        return super().__call__(x) * 2

class Both(Left, Right):
    pass

CLASSES = [Left, Right, Both]
models = [Both(), Left(), Right(), Both()]
""",
    "a base that is called first, its subclass later": CONTEXT
    + """
class Base(Context, Net):
    pass

class Sub(Base):
    def __call__(self, x):
        SEEN.append("sub")
        return super().__call__(x) - 1

class Leaf(Sub):
    pass

CLASSES = [Context, Base, Sub, Leaf]
models = [Base()]

def between_steps(step):
    if step in (1, 4):
        models.append(Sub() if step == 1 else Leaf())
        optimizer.add_param_group({"params": list(models[-1].parameters())})
""",
    "a base whose call is changed while it is watched": CONTEXT
    + """
class Model(Context, Net):
    pass

CLASSES = [Model]
models = [Model()]
before = Context.__call__

def other(self, *args):
    SEEN.append("other")
    return before(self, *args) + 3

def between_steps(step):
    if step == 3:
        Context.__call__ = other
    if step == 5:
        del Context.__call__
""",
    "a class whose own call is changed and given back": """
class Model(Net):
    pass

CLASSES = [Model]
models = [Model()]

def between_steps(step):
    if step == 3:
        before = Model.__call__
        Model.__call__ = lambda self, x: before(self, x) * 2
    if step == 5:
        del Model.__call__
""",
    "a metaclass that refuses attributes": CONTEXT
    + """
class Closed(type):
    def __setattr__(cls, name, value):
        raise TypeError(f"{name} is closed")

    __delattr__ = __setattr__

class Model(Context, Net, metaclass=Closed):
    pass

CLASSES = [Model]
models = [Model()]
""",
    "a call that is no function": """
import functools

class Counting:
    def __init__(self, function):
        self.function = function

    def __get__(self, module, owner=None):
        SEEN.append("bound")
        return functools.partial(self.function, module)

class Model(Net):
    __call__ = Counting(nn.Module.__call__)

class Partial(Net):
    def scaled(self, by, x):
        return by * nn.Module.__call__(self, x)

    __call__ = functools.partialmethod(scaled, 3)

CLASSES = [Model, Partial]
models = [Model(), Partial()]
""",
    "a module of a module, as a LightningModule is": CONTEXT
    + """
class Inner(Context, Net):
    pass

class Training(Context):
    def __init__(self):
        super().__init__()
        self.inner, self.plain = Inner(), Net()

    def forward(self, x):
        SEEN.append("training")
        return self.inner(x) + self.plain(x)

    def training_step(self, x):
        return self(x)

CLASSES = [Inner, Training]
model = Training()
models = [model, model.inner]
model.parameters = lambda: iter(nn.Module.parameters(model))
models[1] = type("Again", (Inner,), {})()
""",
}


@pytest.mark.parametrize("on", ["nonfinite", "early"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_is_what_python_finds(shape: str, on: str, run_python: Run, run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(SHAPES[shape]) + LOOP)
    bare = run_python("train.py")
    watched = run_reprokit("capture", "--on", on, "train.py")
    assert bare.returncode == 0, bare.stderr
    # The watched class holds a `__call__` while the script runs: the last line is compared after a capture below.
    assert watched.stdout.splitlines()[:-1] == bare.stdout.splitlines()[:-1]
    assert watched.returncode == 0
    assert [line for line in watched.stderr.splitlines() if "error of its own" in line] == []


@pytest.mark.parametrize("shape", SHAPES)
def test_classes_have_their_own_call_again(shape: str, run_python: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    watched = "import reprokit\nnote = vars(nn.Module)['__call__']\nwith reprokit.capture(quiet=True):"
    checked = "assert vars(nn.Module)['__call__'] is note"
    body = textwrap.indent(LOOP.strip().rpartition("\n")[0], "    ")
    source = HEAD + textwrap.dedent(SHAPES[shape]) + f"\n{watched}\n{body}\n{checked}\n" + LOOP.strip().splitlines()[-1]
    (tmp_path / "block.py").write_text(source)
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(SHAPES[shape]) + LOOP)
    watched_run, bare = run_python("block.py"), run_python("train.py")
    assert watched_run.returncode == 0, watched_run.stderr
    assert watched_run.stdout == bare.stdout


def test_a_root_through_a_base_is_captured(run_reprokit: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A failure inside of a module whose base has a ``__call__`` is found, and the replay is exact."""
    script = HEAD + CONTEXT + "class Model(Context, Net):\n    pass\n\nCLASSES = []\nmodels = [Model()]\n"
    script += "def between_steps(step):\n    if step == 4:\n        models[0].net.weight.data[0, 0] = float('nan')\n"
    (tmp_path / "train.py").write_text(script + LOOP)
    done = run_reprokit("capture", "-o", "f.pt", "train.py")
    assert done.returncode == 3, done.stderr
    shown = run_reprokit("show", "f.pt")
    assert "exact" in shown.stderr


def test_a_capture_lets_go_of_classes() -> None:
    class Model(torch.nn.Linear):
        pass

    model = Model(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reprokit.capture(quiet=True) as session:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert "__call__" not in vars(Model)
    assert Model not in session._recorder.roots._known
