"""From a claim and its evidence to a verdict: holds, fails, open, measured, or not testable here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Protocol

from assay.bench._card import Claim
from assay.bench._effect import Data, Measured, Observation, Problems, measure, turned
from assay.bench._language import parse_condition, parse_expression, value_of
from assay.bench._study import Value

__all__ = ["ConditionResult", "Evidence", "Observation", "Verdict", "judge"]

Word = Literal["holds", "fails", "open", "measured", "not testable here"]
Interval = tuple[float, float]
FEWEST_SEEDS = 3
LEVEL = 0.95
NOT_RUN = re.compile(r"\bis not run (at this scale|here)\b")  # as a missing arm or value of an axis is reported


class Scaled(Protocol):
    """What a verdict needs to know of an experiment at one scale."""

    @property
    def arms(self) -> Sequence[str]: ...
    @property
    def derived_arms(self) -> Sequence[str]: ...
    @property
    def axes(self) -> Mapping[str, Sequence[Value]]: ...
    @property
    def settings(self) -> Mapping[str, Value]: ...
    @property
    def inputs(self) -> Mapping[str, str]: ...
    @property
    def ignores(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def seeds(self) -> Sequence[int]: ...
    @property
    def overridden(self) -> Sequence[str]: ...
    @property
    def narrowed(self) -> Mapping[str, Sequence[Value]]: ...


@dataclass(frozen=True)
class Evidence:
    """What was observed of an experiment, or why it was not.

    Attributes
    ----------
    blocked
        ``"no CUDA device"`` (its claims are not testable here), or ``"replaced: table"`` (its claims are open, as they
        name a value that another took the place of).
    """

    experiment: Scaled
    observations: Sequence[Observation]
    blocked: str | None = None


@dataclass(frozen=True)
class ConditionResult:
    """One inequality in one cell of ``each``."""

    test: str
    cell: dict[str, Value]
    effect: float | None
    interval: Interval | None
    bar: float | None
    verdict: Word

    def to_json(self) -> dict[str, Any]:
        """As in a result file."""
        return {
            "test": self.test,
            "cell": dict(self.cell),
            "effect": _number(self.effect),
            "interval": _pair(self.interval),
            "bar": _number(self.bar),
        }


@dataclass(frozen=True)
class Verdict:
    """What came of a claim. Effect, interval and bar are those of the condition that decided; the interval is the 95 % one.

    Attributes
    ----------
    seeds
        How many seeds the deciding condition rests on.
    per_seed
        Its effect under each seed of the scale; None where a trial lacks.
    left_out
        The scale runs no experiment, arm or value that the claim is about: it is open because nobody asked.
    """

    id: str
    verdict: Word
    reported: str | None = None
    effect: float | None = None
    interval: Interval | None = None
    bar: float | None = None
    seeds: int = 0
    per_seed: tuple[float | None, ...] = ()
    note: str = ""
    conditions: tuple[ConditionResult, ...] = ()
    left_out: bool = False

    def to_json(self) -> dict[str, Any]:
        """As in a result file: ``nan`` and infinities as text; ``left_out`` stands there where it is so."""
        left_out = {"left_out": True} if self.left_out else {}
        return {
            "id": self.id,
            "verdict": self.verdict,
            "reported": self.reported,
            "effect": _number(self.effect),
            "interval": _pair(self.interval),
            "bar": _number(self.bar),
            "seeds": self.seeds,
            "per_seed": [_number(x) for x in self.per_seed],
            "note": self.note,
            "conditions": [c.to_json() for c in self.conditions],
            **left_out,
        }


def judge(claim: Claim, evidence: Evidence | None) -> Verdict:
    """Decide a claim.

    Every link of a chain is a condition of its own, so that a chain is judged as the list of its inequalities.

    Parameters
    ----------
    claim
        As its card has it, checked against the study.
    evidence
        What was observed; None where the scale leaves the experiment out.

    Raises
    ------
    LanguageError
        Where the claim names an axis that the experiment does not have (`assay.bench._card.check_card` says so before).
    """
    if claim.testable == "no":
        return Verdict(claim.id, "not testable here", claim.reported, note=claim.because or "")
    if evidence is None:
        return Verdict(claim.id, "open", claim.reported, note="its experiment is not run at this scale", left_out=True)
    if evidence.blocked is not None:
        word: Word = "open" if "replaced" in evidence.blocked else "not testable here"
        return Verdict(claim.id, word, claim.reported, note=f"not measured: {evidence.blocked}")
    data = Data(evidence.experiment, evidence.observations)
    problems = Problems()
    cells, absent = _cells(claim, data, problems)
    by_cell = [_measure(claim, cell, data) for cell in cells]
    _premises(claim, cells, data, problems)
    for part in by_cell:
        for m in part:
            problems.update(m.problems)
    if len(data.seeds) < FEWEST_SEEDS:
        problems.add(f"{len(data.seeds)} of at least {FEWEST_SEEDS} seeds")
    remarks = [f"with {', '.join(evidence.experiment.overridden)}"] if evidence.experiment.overridden else []
    for axis, named in claim.each:
        if named is None and (rest := evidence.experiment.narrowed.get(axis)):
            remarks.append(f"without {axis}={', '.join(map(str, rest))}, which the full study has")
    if claim.report is not None:
        return _reported(claim, by_cell, problems, remarks)
    return _decided(claim, by_cell, absent, problems, remarks)


def _cells(claim: Claim, data: Data, problems: Problems) -> tuple[list[dict[str, Value]], int]:
    """The cells of ``each`` that are run, and how many that the card names are not."""
    axes = [axis for axis, _ in claim.each]
    choices: list[list[Value | None]] = []
    for axis, named in claim.each:
        known = data.values(axis)
        if named is None:
            choices.append(list(known))
            continue
        chosen = [value_of(text, known) for text in named]
        for text, value in zip(named, chosen, strict=True):
            if value is None:
                problems.add(f"{axis}={text} is not run here ({axis} is {', '.join(map(str, known))})")
        choices.append(list(chosen))
    every = [dict(zip(axes, values, strict=True)) for values in product(*choices)]
    there = [{k: v for k, v in cell.items() if v is not None} for cell in every if None not in cell.values()]
    return there, len(every) - len(there)


def _measure(claim: Claim, cell: dict[str, Value], data: Data) -> list[Measured]:
    if claim.report is not None:
        return [measure(parse_expression(claim.report), None, None, claim.report, cell, data)]
    return _links(claim.holds_if, cell, data)


def _links(texts: Sequence[str], cell: dict[str, Value], data: Data) -> list[Measured]:
    found = []
    for text in texts:
        for link in parse_condition(text).links():
            effect, relation, bar = turned(link)
            # a bar on the left is shown on the right, where its reader looks for it
            test = link if effect is not link.sides[1] else f"{effect} {relation} {bar}"
            found.append(measure(effect, bar, relation, str(test), cell, data))
    return found


def _premises(claim: Claim, cells: Sequence[dict[str, Value]], data: Data, problems: Problems) -> None:
    """A premise is met by the measured value, in every cell."""
    for cell in cells:
        for m in _links(claim.given, cell, data):
            problems.update(m.problems)
            if m.estimate is None or m.bar is None:
                continue
            effect = m.estimate.effect
            met = {"<": effect < m.bar, "<=": effect <= m.bar, ">": effect > m.bar, ">=": effect >= m.bar}
            if not met[m.relation or "<="]:
                problems.add(f"the premise `{m.test}` is not met{_in(cell)}: {effect:.4g} against {m.bar:.4g}")


def _decided(
    claim: Claim, by_cell: Sequence[Sequence[Measured]], absent: int, problems: Problems, remarks: list[str]
) -> Verdict:
    n = len(by_cell) + absent
    per_cell = sum(len(parse_condition(text).relations) for text in claim.holds_if)
    if claim.in_at_least is None:
        wanted = n
        hold_level, fail_level = LEVEL, 1 - (1 - LEVEL) / max(per_cell * n, 1)
    else:
        wanted = claim.in_at_least
        if wanted > n:
            problems.add(f"in_at_least is {wanted}, and {n} {'cell is' if n == 1 else 'cells are'} run at this scale")
        hold_level = 1 - (1 - LEVEL) / max(n - wanted + 1, 1)
        fail_level = 1 - (1 - LEVEL) / (wanted * per_cell)

    def word(m: Measured) -> Word:
        if m.problems or len(m.seeds) < FEWEST_SEEDS:
            return "open"
        return "holds" if m.side(hold_level) == 1 else "fails" if m.side(fail_level) == -1 else "open"

    words = [[word(m) for m in cell] for cell in by_cell]
    held = sum(all(w == "holds" for w in cell) for cell in words)
    failed = sum("fails" in cell for cell in words)
    verdict: Word
    if problems or not by_cell:
        verdict = "open"
    elif held >= wanted:
        verdict = "holds"
    elif failed >= n - wanted + 1:
        verdict = "fails"
    else:
        verdict = "open"

    decisive = _deciding(by_cell, words, wanted, verdict)
    notes = remarks + problems.sentences()
    if decisive is not None:
        m, own = decisive
        several = len(by_cell) * per_cell > 1
        if several and not problems:
            notes.append(f"decided by `{m.test}`{_in(m.cell)}")
        if claim.in_at_least is not None:
            notes.append(f"true in {held} of {n} cells, {wanted} wanted")
        if not problems and verdict == "open" and own == "open" and m.side(LEVEL) == -1:
            notes.append(
                f"beyond the bar at 95 %, not at the {100 * fail_level:.2f} % that its cells and conditions ask for"
            )
        notes += m.remarks
    return _verdict(claim, verdict, decisive[0] if decisive else None, notes, by_cell, words)


def _deciding(
    by_cell: Sequence[Sequence[Measured]], words: Sequence[Sequence[Word]], wanted: int, verdict: Word
) -> tuple[Measured, Word] | None:
    """The condition that the verdict hangs on: the weakest one of the cell that is the weakest of those wanted."""
    cells = [list(zip(cell, own, strict=True)) for cell, own in zip(by_cell, words, strict=True) if cell]
    if not cells:
        return None
    order = {"fails": 0, "open": 1, "holds": 2}
    # within a cell, what failed stands before what is open; a condition that could not be measured before one that was
    weakest = [min(cell, key=lambda mw: (order[mw[1]], mw[0].margin)) for cell in cells]
    ranked = sorted(weakest, key=lambda mw: (-order[mw[1]], -mw[0].margin))
    chosen = ranked[min(wanted, len(ranked)) - 1]
    if verdict == "open" and chosen[1] != "open":
        undecided = [mw for mw in weakest if mw[1] == "open"] or [mw for c in cells for mw in c if mw[1] == "open"]
        chosen = undecided[-1] if undecided else chosen
    return chosen


def _reported(claim: Claim, by_cell: Sequence[Sequence[Measured]], problems: Problems, remarks: list[str]) -> Verdict:
    own = [["open" if m.problems or len(m.seeds) < FEWEST_SEEDS else "measured" for m in cell] for cell in by_cell]
    first = by_cell[0][0] if by_cell else None
    notes = remarks + problems.sentences()
    if first is not None:
        if len(by_cell) > 1:
            notes.append(f"the number is that{_in(first.cell)}, the first of {len(by_cell)} cells")
        notes += first.remarks
    return _verdict(claim, "open" if problems or not by_cell else "measured", first, notes, by_cell, own)


def _verdict(
    claim: Claim,
    verdict: Word,
    decisive: Measured | None,
    notes: Sequence[str],
    by_cell: Sequence[Sequence[Measured]],
    words: Sequence[Sequence[Any]],
) -> Verdict:
    conditions = tuple(
        ConditionResult(m.test, m.cell, _effect(m), _interval(m), m.bar, word)
        for cell, own in zip(by_cell, words, strict=True)
        for m, word in zip(cell, own, strict=True)
    )
    note = "; ".join(dict.fromkeys(notes))
    lacking = decisive is None or decisive.estimate is None
    left_out = verdict == "open" and lacking and NOT_RUN.search(note) is not None
    if decisive is None:
        return Verdict(claim.id, verdict, claim.reported, note=note, conditions=conditions, left_out=left_out)
    return Verdict(
        id=claim.id,
        verdict=verdict,
        reported=claim.reported,
        effect=_effect(decisive),
        interval=_interval(decisive),
        bar=decisive.bar,
        seeds=sum(seed is not None for seed in decisive.seeds),
        per_seed=tuple(decisive.per_seed),
        note=note,
        conditions=conditions,
        left_out=left_out,
    )


def _effect(m: Measured) -> float | None:
    return None if m.estimate is None else m.estimate.effect


def _interval(m: Measured) -> Interval | None:
    return None if m.estimate is None else m.estimate.interval(LEVEL)


def _in(cell: Mapping[str, Value]) -> str:
    return f" at {', '.join(f'{k}={v}' for k, v in cell.items())}" if cell else ""


def _number(x: float | None) -> float | str | None:
    return x if x is None or math.isfinite(x) else str(x)


def _pair(interval: Interval | None) -> list[float | str | None] | None:
    return None if interval is None else [_number(x) for x in interval]
