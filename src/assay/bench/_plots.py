"""The report's drawings: small SVG, made of numbers and escaped text, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from assay.bench._figures import exact, figure, tick_labels, ticks

Point = tuple[float, float]

# The mark of each verdict, around the origin: told apart by shape as well as by colour.
MARKS = {
    "holds": Markup('<circle r="5"/>'),
    "fails": Markup('<path d="M-4.2-4.2 4.2 4.2M4.2-4.2-4.2 4.2" class="stroke"/>'),
    "open": Markup('<circle r="4.2" class="hollow"/>'),
    "measured": Markup('<path d="M0-5.4 5.4 0 0 5.4-5.4 0Z"/>'),
    "not testable here": Markup('<path d="M-4.5 0H4.5" class="stroke"/>'),
}


def side(test: str) -> int:
    """Which way a condition points: +1 where a larger effect is on its side, -1 where a smaller one is.

    The effect is the side that is measured, so ``0.9 <= coverage[a]`` points up and ``0.9 >= error[a]`` down. A relation
    inside ``share(...)`` is not the condition's own.
    """
    depth = 0
    for i, sign in enumerate(test):
        depth += (sign in "([") - (sign in ")]")
        if depth == 0 and sign in "<>":
            return 1 if (sign == ">") == ("[" in test[:i]) else -1
    return 1


def forest_row(
    verdict: str,
    effect: float | None,
    interval: Sequence[float] | None,
    bar: float | None,
    direction: int,
    per_seed: Sequence[float] = (),
) -> Markup:
    """One row of a forest plot, 240 by 30: the bar in the middle, the claim's side on the right, a scale of its own.

    So a reader sees one thing at a glance: whether the whole interval lies to the right of the line. The numbers stand
    beside it. A figure without a bar is drawn in the middle of its own interval, without a line; no figure is no drawing.
    """
    width, middle, y = 240, 120.0, 15
    line = Markup("") if bar is None else Markup('<path class="bar" d="M120 0V30"/>')
    if effect is None or not math.isfinite(effect):
        return Markup("")
    centre = effect if bar is None else bar
    low, high = interval if interval is not None else (effect, effect)
    finite = [abs(v - centre) for v in (low, high, effect) if math.isfinite(v)]
    reach = max(finite) or abs(centre) * 0.1 or 1.0
    seeds = [s for s in per_seed if math.isfinite(s)]
    if seeds:
        reach = max(reach, min(max(abs(s - centre) for s in seeds), 1.6 * reach))

    def x(value: float) -> float:
        if math.isinf(value):
            return width - 4.0 if (value > 0) == (direction > 0) else 4.0
        return min(max(middle + direction * (value - centre) / reach * 106, 3.0), width - 3.0)

    left, right = sorted((x(low), x(high)))
    dots = Markup("").join(Markup('<circle cx="{}" cy="{}" r="1.6"/>').format(_n(x(s)), y + 9) for s in seeds)
    arrows = Markup("").join(
        Markup('<path class="arrow" d="M{} {}l{} 4v-8z"/>').format(_n(x(v)), y, 6 if x(v) < middle else -6)
        for v in (low, high)
        if math.isinf(v)
    )
    body = Markup(
        '<g class="forest v-{}">{}<path class="span" d="M{} {}H{}"/><path class="cap" d="M{} {}v8M{} {}v8"/>{}'
        '<g class="seeds">{}</g><g class="mark" transform="translate({} {})">{}</g></g>'
    ).format(
        verdict.split()[0], line, _n(left), y, _n(right), _n(left), y - 4, _n(right), y - 4, arrows, dots, _n(x(effect)), y,
        MARKS[verdict],
    )  # fmt: skip
    words = f"{figure(effect)}, interval {figure(low)} to {figure(high)}"
    return _svg(width, 30, body, words if bar is None else f"{words}, bar {figure(bar)}")


def seed_strip(
    verdict: str,
    per_seed: Sequence[float],
    effect: float | None,
    interval: Sequence[float] | None,
    bar: float | None,
) -> Markup:
    """The seeds on an axis of real units, with the interval below them and the bar through both; 360 by 84."""
    low, high = interval if interval is not None else (None, None)
    values = [v for v in (*per_seed, effect, low, high, bar) if v is not None and math.isfinite(v)]
    if not values:
        return Markup("")
    least, most = min(values), max(values)
    pad = (most - least) * 0.07 or abs(most) * 0.05 or 1.0
    least, most = least - pad, most + pad

    def x(value: float) -> float:
        return min(max(14 + (value - least) / (most - least) * 332, 2), 358)

    marks = ticks(least, most, 5)
    axis = Markup("").join(
        Markup('<path class="tick" d="M{} 62v4"/><text x="{}" y="79" text-anchor="middle">{}</text>').format(
            _n(x(t)), _n(x(t)), label
        )
        for t, label in zip(marks, tick_labels(marks), strict=True)
    )
    parts = [Markup('<path class="axis" d="M14 62H346"/>'), axis]
    if bar is not None and math.isfinite(bar):
        anchor = "end" if x(bar) > 280 else "start"
        parts.append(
            Markup(
                '<path class="bar" d="M{} 4V62"/><text class="barname" x="{}" y="12" text-anchor="{}">bar {}</text>'
            ).format(_n(x(bar)), _n(x(bar) + (5 if anchor == "start" else -5)), anchor, exact(bar))
        )
    dots = Markup("").join(
        Markup('<circle cx="{}" cy="26" r="4"><title>{}</title></circle>').format(_n(x(s)), f"seed {i}: {figure(s)}")
        for i, s in enumerate(per_seed)
        if math.isfinite(s)
    )
    parts.append(Markup('<g class="seeds">{}</g>').format(dots))
    if effect is not None and math.isfinite(effect):
        if low is not None and high is not None:
            ends = [x(v) if math.isfinite(v) else (358 if v > 0 else 2) for v in (low, high)]
            parts.append(
                Markup('<path class="span" d="M{} 46H{}"/><path class="cap" d="M{} 42v8M{} 42v8"/>').format(
                    _n(ends[0]), _n(ends[1]), _n(ends[0]), _n(ends[1])
                )
            )
        parts.append(
            Markup('<g class="mark" transform="translate({} 46)">{}</g>').format(_n(x(effect)), MARKS[verdict])
        )
    body = Markup('<g class="strip v-{}">{}</g>').format(verdict.split()[0], Markup("").join(parts))
    return _svg(360, 84, body, "per seed: " + ", ".join(figure(s) for s in per_seed))


def curve_plot(
    name: str, series: Mapping[str, Sequence[Sequence[Point]]], colours: Mapping[str, int], points: int
) -> Markup:
    """Curves of several arms, one thin line a seed and a heavy one for their mean; 340 by 210.

    Parameters
    ----------
    name
        What is drawn.
    series
        ``{arm: [curve of each seed]}``.
    colours
        ``{arm: index}`` of the page's palette, the same in every plot of an experiment.
    points
        At most about so many points a line.
    """
    clean = {a: [[p for p in c if math.isfinite(p[0]) and math.isfinite(p[1])] for c in cs] for a, cs in series.items()}
    clean = {a: [c for c in cs if c] for a, cs in clean.items()}
    everything = [p for cs in clean.values() for c in cs for p in c]
    if not everything:
        return Markup("")
    left, right, top, bottom = 46.0, 332.0, 10.0, 180.0
    x0, x1 = min(p[0] for p in everything), max(p[0] for p in everything)
    y0, y1 = _robust(sorted(p[1] for p in everything))
    logarithmic = y0 > 0 and y1 / y0 > 60
    warp = math.log10 if logarithmic else float
    w0, w1 = warp(y0), warp(y1)
    pad = (w1 - w0) * 0.05 or abs(w1) * 0.05 or 1.0
    w0, w1 = w0 - pad, w1 + pad

    def place(p: Point) -> Point:
        across = (p[0] - x0) / (x1 - x0) if x1 > x0 else 0.5
        value = warp(max(p[1], y0 / 1e3)) if logarithmic else p[1]
        up = min(max((value - w0) / (w1 - w0), -0.02), 1.02)
        return left + across * (right - left), bottom - up * (bottom - top)

    steps = ticks(x0, x1, 4)
    if logarithmic:
        levels = [10.0**k for k in range(math.ceil(w0), math.floor(w1) + 1)] or [y0, y1]
        names = [figure(v) for v in levels]
    else:
        levels = ticks(w0, w1, 4)
        names = tick_labels(levels)
    frame = [
        Markup('<path class="grid" d="M{} {}H{}"/><text x="{}" y="{}" text-anchor="end">{}</text>').format(
            _n(left), _n(place((x0, v))[1]), _n(right), _n(left - 5), _n(place((x0, v))[1] + 3.5), label
        )
        for v, label in zip(levels, names, strict=True)
    ]
    frame += [
        Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(
            _n(place((v, y1))[0]), _n(bottom + 15), "end" if place((v, y1))[0] > right - 12 else "middle", label
        )
        for v, label in zip(steps, tick_labels(steps), strict=True)
    ]
    lines = []
    for arm, curves in clean.items():
        colour = colours[arm] % 8
        drawn = [[place(p) for p in thin(c, points)] for c in curves]
        if len(drawn) > 1:
            lines += [Markup('<path class="one c{}" d="{}"/>').format(colour, _path(c)) for c in drawn]
        mean = _mean(curves)
        if mean:
            dash = Markup(' stroke-dasharray="5 3"') if colours[arm] >= 8 else ""
            lines.append(
                Markup('<path class="all c{}"{} d="{}"><title>{}</title></path>').format(
                    colour, dash, _path([place(p) for p in thin(mean, points)]), arm
                )
            )
    words = f"{name}: " + "; ".join(
        f"{arm} ends at {figure(sum(c[-1][1] for c in cs) / len(cs))}" for arm, cs in clean.items() if cs
    )
    note = (
        Markup('<text x="{}" y="{}" text-anchor="end">log scale</text>').format(_n(right), _n(top + 2))
        if logarithmic
        else ""
    )
    body = Markup('<g class="curves">{}{}{}</g>').format(Markup("").join(frame), note, Markup("").join(lines))
    return _svg(340, 204, body, words)


def thin(curve: Sequence[Point], points: int) -> list[Point]:
    """At most about ``points`` points of a curve: the lowest and the highest of each stretch, and both ends."""
    if len(curve) <= points:
        return list(curve)
    stretches = max(1, points // 2 - 1)
    kept = [curve[0]]
    inner = curve[1:-1]
    for i in range(stretches):
        part = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        if part:
            low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
            kept += [low] if low is high else sorted((low, high), key=lambda p: p[0])
    return [*kept, curve[-1]]


def _mean(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds at the steps that all of them have."""
    if len(curves) == 1:
        return list(curves[0])
    tables = [dict(c) for c in curves]
    shared = sorted(set.intersection(*(set(t) for t in tables))) if tables else []
    return [(s, sum(t[s] for t in tables) / len(tables)) for s in shared]


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """The ends of sorted values without a first spike that would flatten all the rest."""
    least, most = values[0], values[-1]
    if len(values) >= 40:
        low, high = values[len(values) // 50], values[-1 - len(values) // 50]
        reach = (high - low) or abs(high) or 1.0
        least, most = max(least, low - 2 * reach), min(most, high + 2 * reach)
    return least, most


def _path(points: Sequence[Point]) -> str:
    """A path in whole tenths, relative to its last point: half the length of absolute coordinates."""
    tenths = [(round(x * 10), round(y * 10)) for x, y in points]
    text = [f"M{_tenth(tenths[0][0])} {_tenth(tenths[0][1])}"]
    for (a, b), (c, d) in pairwise(tenths):
        if (a, b) != (c, d):
            text.append(f"l{_tenth(c - a)} {_tenth(d - b)}")
    return "".join(text) if len(text) > 1 else text[0] + "h.1"


def _tenth(x: int) -> str:
    return f"{x / 10:g}"


def _n(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def _svg(width: int, height: int, body: Markup, words: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        width, height, escape(words), body
    )
