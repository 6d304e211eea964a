"""Rules about what the step was given (labels, lengths, bad inputs), calls that raise, and events."""

from __future__ import annotations

from collections.abc import Sequence

from reprokit import native
from reprokit.compare.quantity import measured
from reprokit.grammar import values_of
from reprokit.locate.samples import bad_rows, rows_where
from reprokit.locate.spelling import short_name
from reprokit.program.ir import Ref
from reprokit.rules.backward import freed_before, name_of, written_since
from reprokit.rules.edits import loss_over_count, on_call, set_argument
from reprokit.rules.predicates import dtype_name, ignored_by, places, raises
from reprokit.rules.rule import Fix, Numbers, Rule, of_scene
from reprokit.rules.scene import Scene
from reprokit.series.story import StepNumbers
from reprokit.words import data_words


@of_scene
def input_is(scene: Scene, roles: str) -> Numbers | None:
    """True if an input of one of these roles was bad before the first call."""
    failure = scene.failure
    if failure.call is not None or failure.value is None:
        return None
    item = next((item for item in scene.program.inputs if item.value == failure.value), None)
    if item is None or item.role not in roles.split():
        return None
    rows = scene.row_text(Ref(item.value), bad_rows(~native.isfinite(scene.tensors[item.value])))
    rows = f": {rows}" if rows and item.role == "batch" else ""
    counts = {"count": failure.num_bad, "total": failure.num_elements}
    return {"input": f"`{item.name}`", **counts, "role": item.role, "rows": rows}


def ignores_all_targets(scene: Scene) -> Numbers | None:
    """True if every target of a loss is the one it ignores."""
    return ignored_by(scene.origin)


def target_is_longer(scene: Scene) -> Numbers | None:
    """True if a target of ``ctc_loss`` needs more steps than its input has (repeats need one more)."""
    targets = scene.tensor("targets")
    lengths = (
        native.tolist(native.flatten(native.as_tensor(scene.operand(f"{name}_lengths"))))
        for name in ("input", "target")
    )
    start = 0
    for number, (available, length) in enumerate(zip(*lengths, strict=False)):
        labels = targets[number, :length] if native.dim(targets) == 2 else targets[start : start + length]
        start += length
        needed = length + int(native.sum(labels[1:] == labels[:-1]))
        if needed > available:
            row = scene.row_text(scene.recorded("target_lengths"), [number], scene.index)
            return {"needed": needed, "available": available, "row": row}
    return None


# Where a call takes indexes, and what it indexes; the losses and `embedding` in a dimension that is theirs.
_INDEXED = {
    "embedding": (0, 1), "cross_entropy": (1, 0), "nll_loss": (1, 0), "__getitem__": (1, 0), "gather": (2, 0),
    "index_select": (2, 0), "scatter": (2, 0), "scatter_add": (2, 0), "index_add": (2, 0),
}  # fmt: skip


def outside(scene: Scene) -> Numbers | None:
    """The index that is outside of what it indexes, with its place and the size."""
    found = raises("out of (dimension )?(bounds|range)|not in the valid range|smaller than num_classes")(scene)
    if found is None:
        return None
    name = short_name(scene.call) if scene.call is not None else ""
    if name in _INDEXED and isinstance(scene.recorded(_INDEXED[name][0]), Ref):
        return {"seen": _index_words(scene, name)}
    return {"seen": f"`{name}` raises {found['exception'].removesuffix('.')}"}


def _index_words(scene: Scene, name: str) -> str:
    """``the target is 12 at [3] (1 of 8 elements, in row 3), and its input has 10 classes``."""
    slot, of = _INDEXED[name]
    indexes, table, is_loss = scene.tensor(slot), scene.tensor(of), name in ("cross_entropy", "nll_loss")
    dim = 0
    if slot == 2:
        dim = scene.operand(1)
    elif is_loss and native.dim(table) > 1:
        dim = 1
    size, least = table.shape[dim], -table.shape[0] if name == "__getitem__" else 0
    bad = (indexes < least) | (indexes >= size)
    if is_loss:
        bad &= indexes != scene.operand("ignore_index")
    first, beyond = native.tolist(native.nonzero(bad))[0], indexes[bad]
    words = f"{indexes[tuple(first)]} at {first}"
    if len(set(native.tolist(beyond))) > 1:
        words += f", and up to {int(native.max(beyond))}"
    rows = scene.row_text(scene.recorded(slot), rows_where(bad)) if native.dim(indexes) else ""
    if rows:
        words += f" ({int(native.sum(bad))} of {native.numel(bad)} elements, in {rows})"
    what = "rows" if dim == 0 else f"elements in dimension {dim}"
    general = ("the index", "what it indexes")
    if is_loss:
        what, general = "classes", ("the target", "its input")
    known = (name_of(scene.program, scene.recorded(one).value, scene.index) for one in (slot, of))
    own, other = (name if name[0] == "`" else word for name, word in zip(known, general, strict=True))
    return f"{own} is {words}, and {other} has {size} {what}"


def has_empty_sequence(scene: Scene) -> Numbers | None:
    """True if a length is zero or less; without ``enforce_sorted`` the origin is given them sorted."""
    lengths, given, before = scene.tensor(1), scene.recorded(1), scene.index
    for index, call in scene.makers(1):
        if short_name(call) == "sort" and index in scene.seen:
            lengths, given, before = scene.seen[index].argument("x"), call.args[0], index
    rows = scene.row_text(given, bad_rows(lengths <= 0), before)
    return places(lengths <= 0, rows=f": {rows}" if rows else "")


def dtypes_differ(scene: Scene) -> Numbers | None:
    """The floating-point dtypes of the origin's tensors if there are several."""
    names = list(dict.fromkeys(dtype_name(item) for item in scene.arguments() if native.is_floating_point(item)))
    return {"dtypes": " and ".join(names)} if len(names) > 1 else None


_LEAST_STEPS = 8  # with a learning rate, before one that is called a jump
_BEFORE = 10  # steps from a jump of the learning rate to the event
_FACTOR = 3.0  # of a jump


def batch_carries_event(scene: Scene) -> Numbers | None:
    """True if capture found an input of the batch, or rows of it, that is off."""
    event = scene.failure.event
    if event is None or not (event.rows or event.samples or _is_source(scene, "batch")):
        return None
    source = f"`{event.source}`" if event.source else "the batch"
    if event.samples and not event.rows:
        source = f"{event.samples} of the data set"
    rows = f"{event.rows} ({event.samples})" if event.samples else event.rows
    what = f"{rows} of {source}" if event.rows else source
    seen = data_words(values_of(event)) or what
    return {"what": what, "seen": seen, "step": event.began_at, "healthy": event.reference_step}


def parameter_carries_event(scene: Scene) -> Numbers | None:
    """True if capture found a parameter, and no input of the batch, that is off."""
    event = scene.failure.event
    if event is None or event.rows or not _is_source(scene, "parameter"):
        return None
    return {"source": f"`{event.source}`", "step": event.began_at, "healthy": event.reference_step}


def _is_source(scene: Scene, role: str) -> bool:
    event = scene.failure.event
    return event is not None and any(i.role == role and i.name == event.source for i in scene.program.inputs)


def learning_rate_jumped(scene: Scene) -> Numbers | None:
    """True if the learning rate jumped a few steps before the event at most."""
    event = scene.failure.event
    return rate_jump(scene.timeline, event.began_at) if event is not None else None


def rate_jump(timeline: Sequence[StepNumbers], began_at: int) -> Numbers | None:
    """A rise of the learning rate above all rates before, a few steps before an event at most.

    A warm-up rises by less at once, and a restart of a schedule comes back to a rate that the run has had.
    """
    rates = [(row.step, row.lr) for row in timeline if row.lr is not None and row.step <= began_at]
    for place in range(len(rates) - 1, _LEAST_STEPS - 1, -1):
        (step, now), before = rates[place], [rate for _, rate in rates[:place]]
        if step < began_at - _BEFORE:
            break
        if now >= _FACTOR * before[-1] > 0 and now > max(before):
            return {"jump": step, "before": before[-1], "now": now, "times": now / before[-1], "step": began_at}
    return None


def bias_blocks_gradient(scene: Scene) -> Numbers | None:
    """True if the parameter gets a gradient once a bias in front of the origin is zero."""
    event = scene.failure.event
    in_front = {value for _, call in scene.makers("x") for value in call.input_refs()}
    for item in scene.program.inputs if event is not None else ():
        bias = scene.tensors[item.value]
        if item.value in in_front and item.role == "parameter" and native.dim(bias) == 1:
            without = {**scene.tensors, item.value: native.zeros_like(bias)}
            share = measured(scene.program, without, scene.failure)
            if event is not None and share is not None and share < event.threshold:
                low, high = (float(edge) for edge in native.aminmax(native.detach(bias)))
                return {"bias": f"`{item.name}`", "low": low, "high": high}
    return None


def argument_blocks_gradient(scene: Scene) -> Numbers | None:
    """True if everything that the origin is given is below zero."""
    x = scene.tensor("x")
    return (
        {"highest": float(native.max(x)), "total": native.numel(x)}
        if native.numel(x) and bool(native.all(x <= 0))
        else None
    )


def origin_cuts_graph(scene: Scene) -> Numbers | None:
    """True if the origin is `detach`, or ran without recording gradients."""
    if scene.failure.event is None or scene.call is None:
        return None
    if short_name(scene.call) == "detach":
        return {"what": "takes its argument out of the graph"}
    return None if scene.call.mode.grad else {"what": "runs under `no_grad`, so its result has no graph"}


# fmt: off
STEPS = [
    Rule("all-targets-ignored", "All targets are ignored", cause="data",
        phases="forward", calls="cross_entropy nll_loss", is_local=True, when=[ignores_all_targets],
        why="The mean of the loss is taken over the targets that count. All of them are `ignore_index`, so 0 is "
            "divided by 0.",
        seen=["all {count} targets are {ignored}"],
        advice='Use `reduction="sum"` and divide by `max(count, 1)`, or leave such batches out.',
        expected="at least one target that counts", links="pytorch/pytorch/issues/70348 pytorch/pytorch/issues/116349",
        fixes=[Fix("divide the sum of the losses by the number of targets that count, at least one",
                   loss_over_count())]),
    Rule("ctc-target-too-long", "A CTC target that is longer than its input", cause="data",
        phases="forward", calls="ctc_loss", is_local=True, when=[target_is_longer],
        why="CTC needs at least one input step for every label, and one more between two equal labels. There is no "
            "way to align a target that needs more, so its loss is infinite and its gradient NaN.",
        seen=["{row} needs {needed} steps and has {available}"],
        advice="Leave such samples out, lower the downsampling of the model, or pass `zero_infinity=True`.",
        expected="inputs at least as long as their targets with a blank between repeats, or `zero_infinity=True`",
        links="pytorch/pytorch/issues/31557",
        fixes=[Fix("pass zero_infinity=True to {call}", set_argument("zero_infinity", True))]),
    Rule("index-outside", "An index outside of what it indexes", cause="data", kinds="exception", is_shown=True,
        when=[outside], why="`{call}` was given an index that is outside of what it indexes.", seen=["{seen}"],
        advice="Compare the indexes with the size of what they index, where they are made. Only losses skip a label "
               "for padding (`ignore_index`); elsewhere put an index that exists in its place and mask the result.",
        links="pytorch/pytorch/issues/15508"),
    Rule("empty-sequence", "A sequence of length zero", kinds="exception", calls="_pack_padded_sequence", cause="data",
        when=[raises("samples has to be greater than 0"), has_empty_sequence],
        why="`pack_padded_sequence` packs sequences of at least one element. A sample without any has no place in a "
            "packed batch.",
        seen=["{count} of {total} lengths are zero or less{rows}"],
        advice="Leave empty samples out of the batch before they are packed, or keep one padding element of them "
               "(`lengths.clamp(min=1)`).",
        fixes=[Fix("give every sequence at least one element",
                   on_call(lambda call: call.given(1, call[1].clamp(min=1))))]),
    Rule("dtype-mismatch", "Tensors of two dtypes",
        kinds="exception", when=[raises("same dtype|scalar type|should be the same|found dtype"), dtypes_differ],
        why="`{call}` takes tensors of one dtype, and does not convert them.", seen=["`{call}` is given {dtypes}"],
        advice="Convert the tensor where it is made: NumPy's float64 stays float64, parameters are float32. A model "
               "in half precision takes inputs in half precision, or `torch.autocast`.",
        links="pytorch/pytorch/issues/2138"),
    Rule("length-mismatch", "Sizes that do not go together", kinds="exception", confidence="likely",
        when=[raises("batch_size|must match the size|equal size|shape mismatch|size mismatch|shapes cannot be "
                     "multiplied|target size|same size")],
        why="The arguments of `{call}` do not have sizes that go together.", seen=["`{call}` raises {exception}"],
        advice="Compare the shapes of the arguments; usual reasons are a smaller last batch, a sample of another "
               "length, and padding."),
    Rule("bad-data", "The data is bad already", when=[input_is("batch random")], cause="data",
        why="The input {input} is not finite before the first call reads it. No torch call of the step computed it, "
            "so the failure lies in the data or in what prepared it.",
        seen=["{count} of {total} elements of {input} are not finite{rows}"],
        advice="Check the data where it is loaded: divisions by a spread of zero, missing values, decoding errors.",
        links="lukasruff/Deep-SVDD-PyTorch/issues/10"),
    Rule("not-followed", "A call that is not followed made it", confidence="likely", when=[input_is("opaque")],
        why="{input} is the result of a call that is not followed: a compiled or scripted function, an operator of an "
            "extension, a transform of `torch.func`, or a custom function. Nothing that it was given is known to be "
            "bad, so the call itself probably made it so.",
        seen=["{count} of {total} elements of {input} are not finite"],
        advice="Capture again without compiling (`TORCH_COMPILE_DISABLE=1`, `PYTORCH_JIT=0`), or check the values "
               "inside of that call."),
    Rule("bad-parameter", "A parameter, buffer or gradient is bad before the step", cause="state",
        when=[input_is("parameter buffer state gradient")],
        why="The {role} {input} is not finite before the first call reads it: an earlier step, an initialisation or a "
            "checkpoint made it bad.",
        seen=["{count} of {total} elements of {input} are not finite"],
        advice="Look at the step before, at the initialisation, and at what was loaded."),
    Rule("in-place-on-saved", "An in-place operation on a value that the backward pass needs",
        kinds="exception", when=[written_since], cause="state", is_shown=True,
        why="Autograd keeps the values that a derivative is computed from. One of them was written in place after the "
            "forward pass read it.",
        seen=["{seen}"], advice="{advice}", links="pytorch/pytorch/issues/15803 pytorch/pytorch/issues/39141"),
    Rule("backward-twice", "A second backward pass through the same graph",
        kinds="exception", when=[freed_before], cause="state", is_shown=True,
        why="A backward pass frees the values that it was computed from. A later one goes through a part of the same "
            "graph: two losses share it and are differentiated one after the other, or a value from an earlier step "
            "(a hidden state, say) brings its graph along.",
        seen=["{seen}"],
        advice="Add the losses up and differentiate once, or pass `retain_graph=True` to the first backward pass. A "
               "value that is carried from step to step has to be detached.",
        links="pytorch/pytorch/issues/4661"),
    Rule("in-place-on-leaf", "An in-place operation on a leaf that requires grad",
        kinds="exception", when=[raises("leaf Variable that requires grad")],
        why="`{call}` writes in place into a leaf, or a view of one, while gradients are recorded. No call computed "
            "the leaf, and its gradient would be that of the value before the write, so autograd refuses.",
        seen=["{exception}"],
        advice="To change the tensor itself (an initial value, an update by hand) write under `torch.no_grad()`. To "
               "compute with changed values write into a copy (`x = x.clone()`).",
        links="pytorch/examples/pull/779"),
    Rule("batch-carries-event", "The data of this step", cause="data",
        kinds="spike explosion", tier="general", confidence="likely", when=[batch_carries_event],
        why="Step {step} differs from step {healthy} in its data: {what}.",
        seen=["compared with step {healthy} when the step was captured: {seen}"],
        advice="Look at the data of this step: wrong labels, a unit or scale, a broken file. `reprokit trace FILE` "
               "prints the batch and all that is made of it in numbers."),
    Rule("learning-rate-jump", "The learning rate jumped", cause="setting",
        kinds="spike explosion", confidence="likely", when=[learning_rate_jumped],
        why="In step {jump} the learning rate rose from {before:.4g} to {now:.4g}, above all that it was before, and "
            "the event began in step {step}.",
        seen=["the learning rate of step {jump} is {times:.3g} times that of the step before"],
        advice="Look at what sets the learning rate at this step: a scheduler's units (steps or epochs), a restart, a "
               "resumed run. Rise to such a rate over many steps."),
    Rule("parameter-carries-event", "Parameters that an update before this step has changed", cause="state",
        kinds="spike explosion", tier="general", confidence="likely", when=[parameter_carries_event],
        why="The parameter {source} is off its usual range when step {step} begins: an update after step {healthy} "
            "has changed it.",
        seen=["compared with step {healthy} when the step was captured: {source}"],
        advice="Look at the gradient and the learning rate of the step before. Lower the learning rate, warm it up, or "
               "clip gradients (to a lower norm if they are clipped already)."),
    Rule("dead-relu-bias", "A bias that keeps a layer below zero", cause="state",
        kinds="dead silent", calls="relu", trial="a bias of zero",
        when=[argument_blocks_gradient, bias_blocks_gradient],
        why="The bias {bias} makes all arguments of `{call}` negative. Its result and its derivative are zero, so no "
            "gradient gets behind it, and none reaches the bias.",
        seen=["the largest argument is {highest:.4g}; {bias} is {low:.4g} to {high:.4g}; with a bias of zero a "
              "gradient gets through, in a run of this step"],
        advice="Look at what set the bias: the initialisation, a loaded file, one large update. Set it anew; a leaky "
               "ReLU lets a gradient through below zero."),
    Rule("dead-relu", "A layer below zero", kinds="dead silent", calls="relu", when=[argument_blocks_gradient],
        why="All arguments of `{call}` are negative or zero. Its result and its derivative are zero, so no gradient "
            "gets behind it.",
        seen=["the largest of {total} arguments is {highest:.4g}"],
        advice="Look at what makes the arguments negative: an input that is never negative with negative weights, one "
               "large update. Lower the learning rate, normalise before the layer, or use a leaky ReLU."),
    Rule("cut-from-graph", "A call that cuts the graph", kinds="dead silent", when=[origin_cuts_graph],
        why="No gradient gets behind `{call}`, and none reaches the parameter.", seen=["`{call}` {what}"],
        advice="Keep the call out of the way to the loss, or freeze the parameters behind it "
               "(`requires_grad_(False)`) if they are not meant to learn."),
]
# fmt: on
