"""A picture of a decoding: at which step each position was committed, one strip a scheduler."""

from collections.abc import Mapping, Sequence
from typing import Any

from assay._errors import InputError
from assay.mdlm._state import DecodingTrace, DiffusionOutput

_WIDEST = 64  # positions of a strip; longer answers go on below


def trace_picture(
    decodings: Mapping[str, DiffusionOutput | DecodingTrace],
    *,
    row: int = 0,
    signs: Sequence[str] | None = None,
    title: str = "",
) -> Any:
    """Draw when each position of an answer was committed.

    A strip has one cell a position, coloured and numbered by the step; cells that the EOS rule filled are empty. Answers
    of more than 64 positions go on in further strips.

    Parameters
    ----------
    decodings
        Outputs with a trace (``return_trace=True``), or traces, by the name that stands beside the strip.
    row
        Which row of each.
    signs
        What each position of the answer reads (the same for all strips), written above; whitespace and long tokens are
        shortened, control characters become dots.
    title
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        Save it by ``figure.savefig("trace.svg")``.

    Raises
    ------
    InputError
        If there is nothing to draw, or an output has no trace.
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    strips = {name: _steps(name, decoding, row) for name, decoding in decodings.items()}
    if not strips or not max(map(len, strips.values())):
        raise InputError("there is no decoding to draw: give at least one with an answer")
    longest = max(map(len, strips.values()))
    lines = -(-longest // _WIDEST)
    columns = min(longest, _WIDEST)
    height = len(strips) + 0.9
    figure = Figure(figsize=(0.24 * columns + 1.8, 0.26 * lines * height + 0.5), layout="constrained")
    axes = figure.subplots(lines, squeeze=False)[:, 0]
    colours = colormaps["viridis"]
    for line, axis in enumerate(axes):
        begin = line * _WIDEST
        for place, steps in enumerate(strips.values()):
            last = max(max(steps), 1)
            scale = Normalize(1, max(last, 2))
            for column, step in enumerate(steps[begin : begin + _WIDEST]):
                face = colours(scale(step)) if step > 0 else "none"
                box = (float(column), float(place)), 0.94, 0.86
                axis.add_patch(_cell(*box, face))
                if step > 0:
                    ink = "black" if scale(step) > 0.6 else "white"
                    axis.text(column + 0.47, place + 0.46, str(step), ha="center", va="center", size=6, color=ink)
        for column, sign in enumerate((signs or [])[begin : begin + _WIDEST]):
            axis.text(
                column + 0.47,
                -0.35,
                _short(sign),
                ha="center",
                va="center",
                size=6.5,
                family="monospace",
                parse_math=False,
            )
        axis.set(xlim=(-0.1, columns + 0.1), ylim=(len(strips) + 0.1, -0.8), yticks=[])
        axis.set_yticks([place + 0.45 for place in range(len(strips))], list(strips), size=7)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    if title:
        figure.suptitle(title, size=9, parse_math=False)
    return figure


def _steps(name: str, decoding: DiffusionOutput | DecodingTrace, row: int) -> list[int]:
    trace = decoding.trace if isinstance(decoding, DiffusionOutput) else decoding
    if trace is None:
        raise InputError(f"the output {name!r} has no trace: generate with return_trace=True")
    steps = trace.steps[row].tolist()
    given = next((place for place, step in enumerate(steps) if step >= 0), len(steps))
    return [max(step, 0) for step in steps[given:]]


def _cell(corner: tuple[float, float], width: float, height: float, face: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=face, edgecolor="0.75", linewidth=0.4)


def _short(sign: str) -> str:
    """At most three characters of a token: visible ends of line, no bare spaces, a dot for what cannot be printed."""
    shown = sign.replace("\n", "↵").strip() or "·"
    shown = "".join(character if character.isprintable() else "·" for character in shown)
    return shown if len(shown) <= 3 else shown[:2] + "…"
