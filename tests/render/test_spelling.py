"""Names and spelling are those of the line that a call was written on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Program, Ref, Scope
from reprokit.render.names import in_users_words, labels, operand_words
from reprokit.render.printer import write_program
from reprokit.snapshot.format import Snapshot
from tests.render.programs import shown, site_of


def body(code: str, *calls: tuple[str, str, tuple[Any, ...]], inputs: int = 2) -> list[str]:
    """The printed calls of one statement of a user's, each an expression of it; results are numbered from 10."""
    made = [
        Call(target, args, {}, Ref(10 + n), site=site_of(code, part)) for n, (part, target, args) in enumerate(calls)
    ]
    given = tuple(Input(value, "xyz"[value]) for value in range(inputs))
    program = Program(tuple(made), given, (Ref(9 + len(calls)),))
    tensors = {value: torch.ones(2, 2) for value in range(inputs)}
    return shown(write_program(program, tensors, keep=[9 + len(calls)]).body)


@pytest.mark.parametrize(
    ("code", "part", "text"),
    [
        ("weight = snr / self.scale", "snr / self.scale", "weight = snr / scale"),
        ("return acc / total", "acc / total", "out = acc / total"),
        ("return acc.div(total)", "acc.div(total)", "out = acc.div(total)"),
        ("return acc.div(total) if ok else acc", "acc.div(total)", "out = acc.div(total)"),
        ("loss = (acc / total).mean()", "acc / total", "out = acc / total"),
        ('g = state["avg"] / p.grad', 'state["avg"] / p.grad', "g = avg / grad"),
        ('d = grads["weight"] / params["weight"]', 'grads["weight"] / params["weight"]', "d = weight_grad / weight"),
        ("ratio = logits.flatten(0, 1) / (a + b)", "logits.flatten(0, 1) / (a + b)", "ratio = logits / x"),
        ("x = a / b + c / d", "c / d", "out = c / d"),
        ("x, y = a / b, c / d", "c / d", "y = c / d"),
        ("elif (a / b).any():", "a / b", "out = a / b"),
        ("loss = div(\n    a / b,  # ä\n    c / d,\n)", "c / d", "out = c / d"),
        ("loss = (\n    a / b\n)", "a / b", "loss = a / b"),
        ("y = model(x", "model(x", "out = x / y"),
        ("l = I / O", "I / O", "out = x / y"),
    ],
)
def test_one_call(code: str, part: str, text: str) -> None:
    assert body(code, (part, "torch.Tensor.div", (Ref(0), Ref(1)))) == [text]


def test_calls_of_one_line_stay_on_it() -> None:
    code = "scores = (q @ k.transpose(0, 1)).softmax(-1)"
    calls = [
        ("k.transpose(0, 1)", "torch.Tensor.transpose", (Ref(1), 0, 1)),
        ("q @ k.transpose(0, 1)", "torch.Tensor.matmul", (Ref(0), Ref(10))),
        ("(q @ k.transpose(0, 1)).softmax(-1)", "torch.Tensor.softmax", (Ref(11), -1)),
    ]
    assert body(code, *calls) == ["scores = (q @ k.transpose(0, 1)).softmax(-1)"]


def test_parts_of_a_line_that_look_alike_are_told_apart() -> None:
    calls = [
        ("hit / seen", "torch.Tensor.div", (Ref(0), Ref(1))),
        ("seen / asked", "torch.Tensor.div", (Ref(1), Ref(2))),
        ("hit / seen + seen / asked", "torch.Tensor.add", (Ref(10), Ref(11))),
    ]
    assert body("total = hit / seen + seen / asked", *calls, inputs=3) == ["total = hit / seen + seen / asked"]


def test_flags_are_named() -> None:
    call = ("self.rnn(x)", "torch.rnn_relu", (Ref(0), Ref(1), [Ref(0)], False, 1, 0.0, False, False, False))
    assert "has_biases=False, num_layers=1" in " ".join(line.strip() for line in body("return self.rnn(x)", call))


def test_an_argument_that_chooses_the_overload_stays() -> None:
    code = "x.random_(1, None)"
    assert body(code, (code, "torch.Tensor.random_", (Ref(0), 1, None)))[-1].endswith("random_(1, None)")


def test_inputs_without_a_name_are_called_as_the_users_line_calls_them() -> None:
    site = site_of("y = self.windows / scale", "self.windows / scale")
    call = Call("torch.Tensor.div", (Ref(0), Ref(1)), {}, Ref(2), site=site)
    program = Program((call,), (Input(0, "input_26"), Input(1, "sigma")), (Ref(2),))
    failure = Failure("forward", "nan", "nan", value=0, input_name="input_26")
    named = in_users_words(Snapshot(program, {}, failure, 0, 0, "loss"))
    assert [item.name for item in named.program.inputs] == ["windows", "sigma"]
    assert named.failure.input_name == "windows"


def test_a_layer_is_given_what_its_line_says() -> None:
    def operands(layer: str, function: str, code: str, *, inside: str = "Net") -> dict[int, str]:
        scope, site = (Scope("", inside), Scope("net.step", layer)), site_of(code, code[4:], function="forward")
        call = Call(function, (Ref(0), Ref(1), Ref(2)), outputs=Ref(3), scope=scope, site=site)
        return operand_words([call])

    code = "h = self.step(x[:, t], h)"
    assert operands("GRUCell", "torch.gru_cell", code) == {0: "x", 1: "h"}
    assert operands("Linear", "torch.nn.functional.linear", "z = self.step(z)") == {0: "z"}
    assert operands("MultiheadAttention", "torch.nn.functional.linear", code) == {}, "a part of the layer"
    assert operands("MultiheadAttention", "torch.Tensor.mul", code) == {}, "its name only begins as that of the layer"
    assert operands("Linear", "torch.nn.functional.linear", "z = self.mlp(z)", inside="Sequential") == {}
    assert operands("GRUCell", "torch.gru_cell", "h = self.step(*state)") == {}


def test_a_result_of_a_users_function_is_named_as_the_line_that_reads_it() -> None:
    returned, line = "return x + scale", "smallest = logits.min()"
    first = Call("torch.Tensor.add", (Ref(0), Ref(1)), outputs=Ref(2), site=site_of(returned, returned[7:]))
    second = Call("torch.Tensor.min", (Ref(2),), outputs=Ref(3), site=site_of(line, line[11:]))
    program = Program((first, second), (Input(0, "x"), Input(1, "scale")), (Ref(3),))
    assert labels(program) == {0: "x", 1: "scale", 2: "logits", 3: "smallest"}
