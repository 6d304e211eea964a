"""Steps that are frozen and thawed: the same calls, with empty tensors where a step had made something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.capture.traps_checks import (
    BAD_STEP,
    WATCHES,
    batches,
    check_caught,
    check_exact,
    divided_loss,
    ending,
    plain_training,
    update,
)


@pytest.mark.parametrize("watch", WATCHES)
def test_lists_that_the_loop_changes_after_a_call(watch: str, tmp_path: Path) -> None:
    """Also joins of very many samples, and of samples that are written in place afterwards."""

    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        rows: list[torch.Tensor] = []
        for step, x, y in batches():
            rows += [row * 1.5 for row in x] * 5
            joined = torch.stack(rows)[:8]
            joined[0, 0] = float(step)
            rows.clear()
            update(optimizer, divided_loss(model(joined), y, step == BAD_STEP))
        return ending(model)

    check_exact((BAD_STEP, "forward", "torch.Tensor.div"), loop, tmp_path, watch=watch)


def test_a_call_in_several_lines_has_the_line_of_its_own(tmp_path: Path) -> None:
    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        for step, x, y in batches():
            scale = torch.full((), 0.0 if step == BAD_STEP else 1.0)
            loss = (
                model(x).square().mean()
                + (scale
                   / scale)
                - y.float().mean()
            )  # fmt: skip
            update(optimizer, loss)
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    site = snapshot.failure.site
    assert site is not None and site.code.strip() in ("+ (scale", "/ scale)")
