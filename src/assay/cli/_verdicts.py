"""Verdicts as a reader sees them in a terminal: the word, the sentence, the effect against its bar, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.bench._card import Claim
from assay.bench._figures import exact, number, with_interval
from assay.cli._terminal import VERDICT_COLOURS, paint, wrap

_INDENT = 14


def verdict_table(claims: Sequence[Claim], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Claims with what was measured of them; what this scale leaves out and what cannot be tested here come last, in short.

    Parameters
    ----------
    claims
        Of a card: they give the sentences and the paper's figures.
    results
        ``{claim id: verdict}`` in the form of a result file; a claim without one is "not measured".
    """
    words = {claim.id: _word(claim, results) for claim in claims}
    later = [claim.id for claim in claims if results.get(claim.id, {}).get("left_out")]
    here = [claim for claim in claims if words[claim.id] != "not testable here" and claim.id not in later]
    elsewhere = [claim for claim in claims if words[claim.id] == "not testable here"]
    said: set[str] = set()
    parts = ["\n".join(_rows(claim, results.get(claim.id), said)) for claim in here]
    if later:
        parts.append(paint("at a larger scale only", "dim") + "\n" + wrap(", ".join(later), _INDENT))
    if elsewhere:
        lines = [paint("not testable here", "dim")]
        for claim in elsewhere:
            why = claim.because or results[claim.id].get("note") or ""
            lines.append(wrap(claim.says, _INDENT))
            if why:
                lines.append(paint(wrap(why, _INDENT), "dim"))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _word(claim: Claim, results: Mapping[str, Mapping[str, Any]]) -> str:
    if claim.id in results:
        return results[claim.id]["verdict"]
    return "not testable here" if claim.testable == "no" else "not measured"


def _rows(claim: Claim, result: Mapping[str, Any] | None, said: set[str]) -> Iterator[str]:
    """The lines of a claim. What is in ``said`` stands above already, and is not repeated."""
    word = result["verdict"] if result else "not measured"
    sentence = wrap(claim.says, _INDENT, first=word)
    yield paint(sentence[:_INDENT], VERDICT_COLOURS.get(word, "dim")) + sentence[_INDENT:]
    if result and result["effect"] is not None:
        yield wrap(measured(result), _INDENT)
    if claim.reported:
        yield paint(wrap(f"paper: {claim.reported}", _INDENT), "dim")
    if claim.testable == "scaled" and claim.because and claim.because not in said:
        said.add(claim.because)
        yield paint(wrap(f"scaled, in the full study: {claim.because}", _INDENT), "dim")
    if result and result["note"]:
        yield wrap(result["note"], _INDENT)


def measured(result: Mapping[str, Any]) -> str:
    """``0.031 (0.021 to 0.043) against 0.05: missed[vattention] <= delta, at eps=0.1``.

    Parameters
    ----------
    result
        A verdict in the form of a result file, with an effect.
    """
    interval = result["interval"] and [number(end) for end in result["interval"]]
    effect, span = with_interval(number(result["effect"]), interval)
    text = f"{effect} ({span})" if interval else effect
    if result["bar"] is not None:
        text += f" against {exact(number(result['bar']))}"
    deciding = [c for c in result["conditions"] if c["effect"] == result["effect"] and c["bar"] == result["bar"]]
    if deciding:
        cell = deciding[0]["cell"]
        at = (
            ", ".join(f"{axis}={value}" for axis, value in cell.items())
            if isinstance(cell, Mapping)
            else str(cell or "")
        )
        text += f": {deciding[0]['test']}" + (f", at {at}" if at else "")
    return text
