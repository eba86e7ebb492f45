"""The report: one page that needs nothing else, with every claim, its figure, its plots and the command that repeats it."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import assay
from assay.bench._figures import duration, exact, figure, many, number, places, size, with_interval
from assay.bench._files import whole_file
from assay.bench._plots import MARKS, curve_plot, forest_row, seed_strip, side
from assay.bench._results import VERDICTS

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".svg")
TEXTS = (".txt", ".md", ".json", ".csv", ".log")
PICTURE_BYTES = 2_000_000  # of all pictures together, so that the page stays light
CURVE_POINTS = 220_000  # of all curves together
PLOTS = 12  # of one curve of one experiment; the rest is in the export


@dataclass
class Extra:
    """What a report can show beside the verdicts, where the caller has it.

    Attributes
    ----------
    prepared
        ``[{"name", "at", "result"}]`` a method: what its prepares returned, tuning above all.
    artifacts
        ``[(label, path)]`` a method: pictures and texts that trials left in their folders.
    """

    prepared: Sequence[Mapping[str, Any]] = ()
    artifacts: Sequence[tuple[str, Path]] = ()


@dataclass
class _Claim:
    id: str
    says: str
    verdict: str
    word: str
    reported: str
    scope: str
    effect: str
    interval: str
    bar: str
    relation: str
    forest: Markup
    strip: Markup
    per_seed: list[tuple[str, str]]
    note: str
    conditions: list[dict[str, Any]]
    in_cells: bool
    command: str
    experiment: str
    search: str


@dataclass
class _Method:
    slug: str
    anchor: str
    title: str
    summary: str
    fields: Sequence[str]
    paper: Any
    paper_link: str
    scale: str
    command: str
    claims: list[_Claim]
    trials: str
    lost: list[tuple[str, str, int]]
    curves: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    tuning: list[dict[str, Any]]
    pictures: list[dict[str, str]]
    texts: list[dict[str, str]]
    left_out: int
    setting: list[tuple[str, list[tuple[str, str]]]]
    terms: str
    counts: dict[str, int] = field(default_factory=dict)


def write_report(
    path: Path, results: Iterable[Any], *, extra: Mapping[str, Extra] | None = None, now: datetime | None = None
) -> Path:
    """Write the page, beside its place first and then renamed.

    Parameters
    ----------
    path
        The HTML file.
    results : CheckResult
        One a method and scale.
    extra
        What else there is to show, by slug.
    now
        The time on the page; default: now.
    """
    text = render(results, extra=extra, now=now)
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")
    return path


def render(results: Iterable[Any], *, extra: Mapping[str, Extra] | None = None, now: datetime | None = None) -> str:
    """The page as text; see `write_report`."""
    results = sorted(results, key=lambda r: (r.card.title.lower(), r.scale))
    room = _Room(results)
    methods = [_method(result, (extra or {}).get(result.method, Extra()), room) for result in results]
    _tell_apart(methods)
    counts = Counter(claim.verdict for method in methods for claim in method.claims)
    fields = Counter(name for method in methods for name in method.fields)
    page = _environment().get_template("report.html")
    script = _environment().get_template("report.js").render()
    return page.render(
        methods=methods,
        counts={word: counts[word] for word in VERDICTS},
        total=sum(counts.values()),
        distinct=len({m.slug for m in methods}),
        fields=sorted(fields.items()),
        scales=sorted({m.scale for m in methods}, key=("quick", "full", "paper").index),
        now=now or datetime.now().astimezone(),
        version=assay.__version__,
        marks=MARKS,
        style=Markup(_environment().get_template("report.css").render()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _tell_apart(methods: Sequence[_Method]) -> None:
    """Addresses for a method that stands on the page at several scales, or on several terms."""
    slugs = Counter(m.slug for m in methods)
    seen: Counter[str] = Counter()
    for m in methods:
        if slugs[m.slug] > 1:
            m.anchor = f"{m.slug}-{m.scale}"
        seen[m.anchor] += 1
        if seen[m.anchor] > 1:
            m.anchor += f"-{seen[m.anchor]}"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("assay.bench"),
        autoescape=lambda name: name is None or name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["many"] = many
    return environment


class _Room:
    """What is left of the page's weight for curves and pictures."""

    def __init__(self, results: Sequence[Any]) -> None:
        lines = sum(
            len(observation.curves)
            for result in results
            for evidence in result.evidence.values()
            for observation in evidence.observations
        )
        self.points = max(24, min(160, CURVE_POINTS // max(lines, 1)))
        self.pictures = PICTURE_BYTES


# A method


def _method(result: Any, extra: Extra, room: _Room) -> _Method:
    card = result.card
    flags = _flags(result)
    says = {claim.id: claim for claim in card.claims}
    claims = [_claim(verdict, says.get(verdict.id), result, flags) for verdict in result.verdicts]
    counts = Counter(claim.verdict for claim in claims)
    pictures, texts, left_out = _artifacts(extra.artifacts, room)
    return _Method(
        slug=result.method,
        anchor=result.method,
        title=card.title,
        summary=card.summary,
        fields=card.fields,
        paper=card.paper,
        paper_link=_paper_link(card.paper.id),
        scale=result.scale,
        command=shlex.join(["assay", "check", result.method, "--scale", result.scale, *result.partial]),
        claims=claims,
        trials=_trials(result.trials, result.interrupted),
        lost=_lost(result.evidence),
        curves=_curves(result.evidence, room.points),
        costs=_costs(result.evidence),
        tuning=[_tuning(p) for p in extra.prepared if p.get("result")],
        pictures=pictures,
        texts=texts,
        left_out=left_out,
        setting=_setting(result),
        terms=shlex.join(result.partial),
        counts={word: counts[word] for word in VERDICTS if counts[word]},
    )


def _claim(verdict: Any, claim: Any, result: Any, flags: Sequence[str]) -> _Claim:
    effect, bar = number(verdict.effect), number(verdict.bar)
    interval = _pair(verdict.interval)
    deciding = _deciding(verdict)
    direction = side(deciding.test) if deciding else _inferred(verdict.verdict, effect, bar)
    effect_text, interval_text = with_interval(effect, interval)
    experiment = (claim.experiment if claim else None) or ""
    only = ["--only", experiment] if experiment else []
    per_seed = [number(s) for s in verdict.per_seed or ()]
    plain = [s for s in per_seed if s is not None]
    seeds = verdict.seeds if isinstance(verdict.seeds, list | tuple) else range(len(per_seed))
    says = claim.says if claim else verdict.id
    because = (claim.because if claim else None) or ""
    testable = claim.testable if claim else "full"
    scope = (
        {"no": "Not testable here: ", "scaled": "Smaller than in the paper, in the full study: "}.get(testable, "")
        + because
        if because
        else ""
    )
    reported = verdict.reported or ""
    scale = "full" if verdict.left_out and result.scale == "quick" else result.scale
    return _Claim(
        id=verdict.id,
        says=says,
        verdict=verdict.verdict,
        word=verdict.verdict.split()[0],
        reported=reported,
        scope=scope,
        effect=effect_text,
        interval=interval_text if interval else "",
        bar="" if bar is None else exact(bar),
        relation="" if bar is None else ("at least" if direction > 0 else "at most"),
        forest=forest_row(verdict.verdict, effect, interval, bar, direction, plain),
        strip=seed_strip(verdict.verdict, plain, effect, interval, bar) if plain else Markup(""),
        per_seed=[(str(s), figure(v, places(interval))) for s, v in zip(seeds, per_seed)] if plain else [],
        note="" if verdict.note == because else verdict.note or "",
        conditions=[_condition(c) for c in verdict.conditions],
        in_cells=any(c.cell for c in verdict.conditions),
        command=shlex.join(["assay", "check", result.method, "--scale", scale, *only, *flags]),
        experiment=experiment,
        search=" ".join((verdict.id, says, reported, experiment)).lower(),
    )


def _condition(condition: Any) -> dict[str, Any]:
    effect, bar, interval = number(condition.effect), number(condition.bar), _pair(condition.interval)
    text, span = with_interval(effect, interval)
    return {
        "test": condition.test,
        "cell": _cell(condition.cell),
        "effect": text,
        "interval": span if interval else "",
        "bar": "" if bar is None else exact(bar),
        "verdict": condition.verdict,
        "word": condition.verdict.split()[0],
        "forest": forest_row(condition.verdict, effect, interval, bar, side(condition.test)),
    }


def _deciding(verdict: Any) -> Any | None:
    """The condition whose figures the verdict took."""
    same = [
        c
        for c in verdict.conditions
        if (c.effect, c.bar) == (verdict.effect, verdict.bar) and _pair(c.interval) == _pair(verdict.interval)
    ]
    return same[0] if same else (verdict.conditions[0] if len(verdict.conditions) == 1 else None)


def _inferred(verdict: str, effect: float | None, bar: float | None) -> int:
    if effect is None or bar is None or effect == bar:
        return 1
    above = effect > bar
    return 1 if above == (verdict != "fails") else -1


def _pair(interval: Sequence[Any] | None) -> tuple[float, float] | None:
    return None if interval is None else (float(interval[0]), float(interval[1]))


def _cell(cell: Any) -> str:
    pairs = cell.items() if isinstance(cell, Mapping) else cell
    if isinstance(pairs, str):
        return pairs
    return ", ".join(f"{axis}={value}" for axis, value in pairs or ())


def _flags(result: Any) -> list[str]:
    """The options that it was run with, as they are typed, but for the experiments that it was narrowed to."""
    flags, parts = [], list(result.partial)
    while parts:
        pair, parts = parts[:2], parts[2:]
        if pair[0] != "--only":
            flags += pair
    return flags


def _paper_link(paper: str) -> str:
    found = re.fullmatch(r"arXiv:(\d{4}\.\d{4,5})(v\d+)?", paper)
    return f"https://arxiv.org/abs/{found[1]}" if found else ""


def _trials(trials: Mapping[str, int], interrupted: bool) -> str:
    done = trials.get("done", 0) + trials.get("reused", 0)
    parts = [f"{many(done, 'trial')} measured"]
    parts += [f"{trials[word]} {word}" for word in ("failed", "skipped", "missing") if trials.get(word)]
    return ", ".join(parts) + (", interrupted" if interrupted else "")


def _lost(evidence: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Why trials gave no figure, and how often: (experiment, reason, trials)."""
    reasons: Counter[tuple[str, str]] = Counter()
    for name, part in evidence.items():
        if part.blocked:
            reasons[name, part.blocked] += 1
        for o in part.observations:
            if o.status not in ("done", "missing"):
                reasons[name, f"{o.arm}: {o.status}" + (f", {o.why}" if o.why else "")] += 1
    return [(name, why, n) for (name, why), n in reasons.most_common()]


def _setting(result: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """Machine, versions and data, as lists of names and values."""
    parts = []
    for title, entries in (
        ("Machine", result.machine),
        ("Versions", result.versions),
        ("Data and models", result.data),
    ):
        rows = [(str(k).replace("_", " "), _plain(v)) for k, v in (entries or {}).items() if v is not None]
        if rows:
            parts.append((title, rows))
    return parts


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{k} {str(v)[:12] if k == 'sha256' else _plain(v)}" for k, v in value.items() if v is not None
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, float):
        return exact(value)
    return str(value)


# Curves and costs


def _curves(evidence: Mapping[str, Any], points: int) -> list[dict[str, Any]]:
    """The plots of each experiment: one a curve and cell, with a palette that is the same in all of them."""
    shown = []
    for experiment, part in evidence.items():
        series: dict[tuple[str, str], dict[str, list[Any]]] = {}
        for o in part.observations:
            if o.status == "done":
                for name, curve in o.curves.items():
                    series.setdefault((name, _cell(o.at)), {}).setdefault(o.arm, []).append(curve)
        if not series:
            continue
        # An arm that ignores an axis stands in the plots of all its values.
        for (name, at), arms in list(series.items()):
            for (other, wider), more in series.items():
                if other == name and wider != at and set(filter(None, wider.split(", "))) < set(at.split(", ")):
                    for arm, curves in more.items():
                        arms.setdefault(arm, curves)
        cells = {key: arms for key, arms in series.items() if not _covered(key, series)}
        order = [a for a in part.experiment.arms if any(a in arms for arms in cells.values())]
        order += sorted({a for arms in cells.values() for a in arms} - set(order))
        colours = {arm: i for i, arm in enumerate(order)}
        plots, left_out = [], 0
        drawn: Counter[str] = Counter()
        for (name, at), arms in cells.items():
            drawn[name] += 1
            if drawn[name] > PLOTS:
                left_out += 1
                continue
            ordered = {arm: arms[arm] for arm in order if arm in arms}
            plots.append({"name": name, "at": at, "svg": curve_plot(name, ordered, colours, points)})
        shown.append({"experiment": experiment, "plots": plots, "arms": list(colours.items()), "left_out": left_out})
    return shown


def _covered(key: tuple[str, str], series: Mapping[tuple[str, str], Any]) -> bool:
    """Whether every arm of this cell stands in finer ones too."""
    name, at = key
    mine = set(filter(None, at.split(", ")))
    return any(other == name and set(filter(None, finer.split(", "))) > mine for other, finer in series)


def _costs(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds and peak memory of one trial, arm by arm: the median, and what it ranged over."""
    shown = []
    for experiment, part in evidence.items():
        rows: list[dict[str, Any]] = []
        for arm in dict.fromkeys(o.arm for o in part.observations):
            seconds = _plain_numbers(part.observations, arm, "seconds")
            peak = _plain_numbers(part.observations, arm, "peak_bytes")
            if seconds or peak:
                middle = statistics.median(seconds) if seconds else None
                rows.append(
                    {
                        "arm": arm,
                        "trials": len(seconds or peak),
                        "raw": middle or 0.0,
                        "seconds": duration(middle),
                        "range": f"{duration(min(seconds))} to {duration(max(seconds))}" if len(seconds) > 1 else "",
                        "peak": size(statistics.median(peak)) if peak else "–",
                    }
                )
        most = max((row["raw"] for row in rows), default=0.0)
        for row in rows:
            row["share"] = round(100 * row["raw"] / most, 1) if most else 0
        if rows:
            shown.append({"experiment": experiment, "rows": rows})
    return shown


def _plain_numbers(observations: Sequence[Any], arm: str, name: str) -> list[float]:
    found = [o.measures.get(name) for o in observations if o.arm == arm and o.status == "done"]
    return [float(v) for v in found if isinstance(v, int | float)]


# Prepares and artifacts


def _tuning(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """What a prepare returned: a table where an entry is a mapping or a list of them, else names and values."""
    plain, tables = [], []
    for key, value in prepared["result"].items():
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            columns = list(dict.fromkeys(str(k) for v in value for k in v))
            tables.append((str(key), columns, [[_plain(v.get(c, "")) for c in columns] for v in value]))
        elif isinstance(value, Mapping) and value:
            tables.append((str(key), ["", str(key)], [[str(k), _plain(v)] for k, v in value.items()]))
        else:
            plain.append((str(key), _plain(value)))
    return {"name": prepared["name"], "at": _cell(prepared.get("at", {})), "plain": plain, "tables": tables}


def _artifacts(
    artifacts: Sequence[tuple[str, Path]], room: _Room
) -> tuple[list[dict[str, str]], list[dict[str, str]], int]:
    """Pictures as data, made smaller where they are large; texts by their beginning; and how many found no room."""
    pictures: list[dict[str, str]] = []
    texts: list[dict[str, str]] = []
    left_out = 0
    for label, path in artifacts:
        ending = path.suffix.lower()
        if ending in PICTURES:
            data = _picture(path)
            if len(data) > room.pictures:
                left_out += 1
            else:
                room.pictures -= len(data)
                pictures.append({"label": label, "data": data})
        elif ending in TEXTS and len(texts) < 12:
            with path.open(encoding="utf-8", errors="replace") as file:
                start = file.read(4001)
            texts.append({"label": label, "text": start[:4000] + (" …" if len(start) > 4000 else "")})
        else:
            left_out += 1
    return pictures, texts, left_out


def _picture(path: Path) -> str:
    """A ``data:`` address; raster pictures over 80 kB come as WebP of at most 900 pixels."""
    raw = path.read_bytes()
    kind = {".jpg": "jpeg", ".svg": "svg+xml"}.get(path.suffix.lower(), path.suffix.lower()[1:])
    if len(raw) > 80_000 and kind != "svg+xml":
        from PIL import Image

        with Image.open(io.BytesIO(raw)) as image:
            image.thumbnail((900, 900))
            small = io.BytesIO()
            image.convert("RGBA" if "A" in image.getbands() else "RGB").save(small, "WEBP", quality=80)
        if small.tell() < len(raw):
            raw, kind = small.getvalue(), "webp"
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"
