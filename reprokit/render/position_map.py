"""The map of a tensor's bad positions, as SVG; neighbours in a row are drawn as one."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from reprokit.render.positions import Positions

_CELL_CLASSES = {"nan": "cell-nan", "+inf": "cell-plus", "-inf": "cell-minus"}
_MAP_WIDTH, _MAX_CELL, _MIN_CELL = 640, 16, 6


def position_map(found: Positions) -> Markup:
    """A square for every cell, coloured where it is bad; neighbours in a row are drawn as one."""
    rows, columns = len(found.cells), len(found.cells[0])
    size = max(_MIN_CELL, min(_MAX_CELL, _MAP_WIDTH // columns))
    width, height = columns * size, rows * size
    marks = [f'<rect class="cell" width="{width}" height="{height}"/>']
    for row, cells in enumerate(found.cells):
        for start, length, way in _runs(cells):
            marks.append(
                f'<rect class="{_CELL_CLASSES[way]}" x="{start * size}" y="{row * size}" '
                f'width="{length * size}" height="{size}"/>'
            )
    lines = "".join(f"M{column * size} 0V{height}" for column in range(1, columns))
    lines += "".join(f"M0 {row * size}H{width}" for row in range(1, rows))
    marks.append(f'<path class="cell-lines" d="{lines}"/>' if lines else "")
    label = f"positions of elements that are not finite. {found.pattern}"
    return Markup(
        f'<svg class="map" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _runs(cells: Sequence[str]) -> list[tuple[int, int, str]]:
    """Where bad cells of one kind begin, how many follow each other, and which kind."""
    runs: list[tuple[int, int, str]] = []
    for column, way in enumerate(cells):
        if not way:
            continue
        if runs and runs[-1][2] == way and runs[-1][0] + runs[-1][1] == column:
            start, length, _ = runs.pop()
            runs.append((start, length + 1, way))
        else:
            runs.append((column, 1, way))
    return runs
