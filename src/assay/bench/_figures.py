"""Numbers as people read them: as many digits as the interval is worth, and units that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

MINUS = "\N{MINUS SIGN}"


def number(x: float | int | str | None) -> float | None:
    """A number from its JSON form: text such as ``"inf"`` is a float, None stays None."""
    return None if x is None else float(x)


def figure(x: float | None, digits: int | None = None) -> str:
    """A number with a true minus sign: three significant digits, or ``digits`` after the point."""
    if x is None:
        return "–"
    if math.isnan(x):
        return "not a number"
    if math.isinf(x):
        return "∞" if x > 0 else MINUS + "∞"
    if digits is None:
        digits = _places(abs(x))
    elif x != 0 and (abs(x) >= 1e6 or abs(x) < 1e-4):
        digits = -1
    if digits < 0:
        mantissa, power = f"{x:.2e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(power)}".replace("-", MINUS)
    text = f"{x:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS).replace(",", "\N{NARROW NO-BREAK SPACE}")


def exact(x: float | None) -> str:
    """A number that was set, not measured: as short as it is, up to six digits."""
    if x is None or not math.isfinite(x) or x == 0 or abs(x) >= 1e6 or abs(x) < 1e-4:
        return figure(x)
    return f"{x:.6g}".replace("-", MINUS)


def places(interval: Sequence[float] | None) -> int | None:
    """The decimals that an interval is worth: its half-width to one digit, to two where it starts with 1, 2 or 3.

    None where powers of ten read better, or where there is no width to go by.
    """
    if interval is None:
        return None
    low, high = interval
    width, largest = (high - low) / 2, max(abs(low), abs(high))
    if not math.isfinite(width) or width <= 0 or largest >= 1e6 or largest < 1e-4:
        return None
    power = math.floor(math.log10(width))
    return min(max(0, -power + (width / 10**power < 3.55)), 6)


def with_interval(effect: float | None, interval: Sequence[float] | None) -> tuple[str, str]:
    """An effect and its interval, both to the digits that the interval is worth.

    Returns
    -------
    effect, interval
        ``("0.908", "0.903 to 0.913")``; an en dash where there is none.
    """
    if effect is None or interval is None:
        return figure(effect), "–"
    low, high = interval
    if low == high == effect:
        return exact(effect), "no spread"
    digits = places(interval)
    return figure(effect, digits), f"{figure(low, digits)} to {figure(high, digits)}"


def duration(seconds: float | None) -> str:
    """``0.8 ms``, ``12.3 s``, ``4 min 10 s``, ``2 h 05 min``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{figure(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float | None) -> str:
    """``512 B``, ``1.4 GiB``."""
    if count is None or not math.isfinite(count):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def many(n: int, word: str, plural: str | None = None) -> str:
    """``1 claim``, ``5 claims``."""
    return f"{n} {word if n == 1 else plural or word + 's'}"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two ends, about so many of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """One number of digits for all the ticks of an axis."""
    if len(values) < 2:
        return [figure(v) for v in values]
    step = abs(values[1] - values[0])
    if max(map(abs, values)) >= 1e6 or step < 1e-4:
        return [figure(v, -1) if v else "0" for v in values]
    places = 0
    while places < 6 and any(abs(v * 10**places - round(v * 10**places)) > 1e-6 * 10**places * step for v in values):
        places += 1
    return [figure(v, places) for v in values]


def _places(magnitude: float) -> int:
    """Decimals for three significant digits; -1 where powers of ten read better."""
    if magnitude == 0:
        return 0
    if magnitude >= 1e6 or magnitude < 1e-4:
        return -1
    return max(0, 2 - math.floor(math.log10(magnitude)))
