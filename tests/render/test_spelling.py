"""Names and spelling are those of the line that a call was written on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Program, Ref, Scope, Site
from reprokit.render.code import write_program
from reprokit.render.spelling import in_users_words, spellings
from reprokit.snapshot.format import Snapshot


def body(code: str, *calls: tuple[str, tuple[Any, ...]], inputs: int = 2) -> list[str]:
    """The printed calls of one line of a user's; results are numbered from 10."""
    made = [
        Call(target, args, {}, Ref(10 + n), site=Site("train.py", 3, code)) for n, (target, args) in enumerate(calls)
    ]
    given = tuple(Input(value, "xyz"[value]) for value in range(inputs))
    program = Program(tuple(made), given, (Ref(9 + len(calls)),))
    tensors = {value: torch.ones(2, 2) for value in range(inputs)}
    return list(write_program(program, tensors, keep=[9 + len(calls)]).body)


DIV = ("torch.Tensor.div", (Ref(0), Ref(1)))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("weight = snr / self.scale", "weight = snr / scale"),
        ("return acc / total", "out = acc / total"),
        ("return acc.div(total)", "out = acc.div(total)"),
        ("return acc.div(total) if total is not None else acc", "out = acc.div(total)"),
        ("return acc if not flag else acc.div(total)", "out = acc.div(total)"),
        ("loss = (acc / total).mean()", "out = acc / total"),
        ('g = state["avg"] / p.grad', "g = avg / grad"),
        ('d = grads["weight"] / params["weight"]', "d = weight_grad / weight"),
        ("ratio = logits.flatten(0, 1) / (a + b)", "ratio = logits / x"),
        ("x = a / b + c / d", "out = x / y"),
        ("y = model(x", "out = x / y"),
        ("l = I / O", "out = x / y"),
    ],
)
def test_one_call(code: str, text: str) -> None:
    assert body(code, DIV) == [text]


def test_calls_of_one_line_stay_on_it() -> None:
    code = "scores = (q @ k.transpose(0, 1)).softmax(-1)"
    calls = [
        ("torch.Tensor.transpose", (Ref(1), 0, 1)),
        ("torch.Tensor.matmul", (Ref(0), Ref(10))),
        ("torch.Tensor.softmax", (Ref(11), -1)),
    ]
    assert body(code, *calls) == ["scores = (q @ k.transpose(0, 1)).softmax(-1)"]


def test_parts_of_a_line_that_look_alike_are_told_apart() -> None:
    calls = [
        ("torch.Tensor.div", (Ref(0), Ref(1))),
        ("torch.Tensor.div", (Ref(1), Ref(2))),
        ("torch.Tensor.add", (Ref(10), Ref(11))),
    ]
    assert body("total = hit / seen + seen / asked", *calls, inputs=3) == ["total = hit / seen + seen / asked"]


def test_flags_are_named() -> None:
    call = ("torch.rnn_relu", (Ref(0), Ref(1), [Ref(0)], False, 1, 0.0, False, False, False))
    assert "has_biases=False, num_layers=1" in " ".join(line.strip() for line in body("return self.rnn(x)", call))


def test_an_argument_that_chooses_the_overload_stays() -> None:
    assert body("x.random_(1, None)", ("torch.Tensor.random_", (Ref(0), 1, None)))[-1].endswith("random_(1, None)")


def test_functions_of_torchs_namespaces_are_found_on_their_line() -> None:
    site = Site("train.py", 3, "w, v = torch.linalg.eigh(lap)")
    (spelling,) = spellings([Call("torch.linalg.eigh", (Ref(0),), outputs=(Ref(1), Ref(2)), site=site)])
    assert (spelling.operands, spelling.results) == ({0: "lap"}, {1: "w", 2: "v"})


def test_what_a_line_hands_on_is_not_named_after_what_it_assigns() -> None:
    def calls(reader: str) -> list[Call]:
        line = Site("train.py", 3, "loss = spread(net(x), y)", "main")
        return [
            Call("torch.nn.functional.linear", (Ref(0), Ref(1)), outputs=Ref(2), site=line),
            Call("torch.Tensor.sqrt", (Ref(2),), outputs=Ref(3), site=Site("train.py", 9, "z.sqrt()", reader)),
        ]

    assert spellings(calls("spread"))[0].results == {}
    assert spellings(calls("main"))[0].results == {2: "loss"}


def test_inputs_without_a_name_are_called_as_the_users_line_calls_them() -> None:
    call = Call("torch.Tensor.div", (Ref(0), Ref(1)), {}, Ref(2), site=Site("train.py", 3, "y = self.windows / scale"))
    program = Program((call,), (Input(0, "input_26"), Input(1, "sigma")), (Ref(2),))
    failure = Failure("forward", "nan", "nan", value=0, input_name="input_26")
    named = in_users_words(Snapshot(program, {}, failure, 0, 0, "loss"))
    assert [item.name for item in named.program.inputs] == ["windows", "sigma"]
    assert named.failure.input_name == "windows"


def test_a_layer_is_given_what_its_line_says() -> None:
    def operands(layer: str, function: str, code: str) -> dict[int, str]:
        scope, site = (Scope("", "Net"), Scope("net.step", layer)), Site("net.py", 3, code, "forward")
        call = Call(function, (Ref(0), Ref(1), Ref(2)), outputs=Ref(3), scope=scope, site=site)
        return dict(spellings([call])[0].operands)

    code = "h = self.step(x[:, t], h)"
    assert operands("GRUCell", "torch.gru_cell", code) == {0: "x", 1: "h"}
    assert operands("Linear", "torch.nn.functional.linear", "z = self.step(z)") == {0: "z"}
    assert operands("MultiheadAttention", "torch.nn.functional.linear", code) == {}, "a part of the layer"
    assert operands("GRUCell", "torch.gru_cell", "h = self.other(x, h)") == {}
    assert operands("GRUCell", "torch.gru_cell", "h = self.step(*state)") == {}
