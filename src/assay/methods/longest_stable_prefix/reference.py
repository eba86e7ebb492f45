"""The rule of `longest_stable_prefix` place by place and threshold by threshold, as one would tell it."""

import math
from collections.abc import Sequence

from assay.methods.longest_stable_prefix._prefix import LSPDecision, PrefixRule


def longest_stable_prefix(
    margins: Sequence[float],
    stable: Sequence[bool] | None,
    is_delim: Sequence[bool],
    rule: PrefixRule,
    *,
    starts_word: Sequence[bool] | None = None,
    whole: Sequence[bool] | None = None,
    is_eos: Sequence[bool] | None = None,
) -> LSPDecision:
    """One row; arguments as for `assay.methods.longest_stable_prefix._prefix.decide`."""
    n = len(margins)
    if n == 0:
        return LSPDecision(0, 0, math.inf, False, "flat")
    least = min(rule.min_commit, n)

    def left_by(tau: float) -> int:
        """How many leading places have no margin below tau."""
        return next((place for place in range(n) if margins[place] < tau), n)

    if rule.fixed_tau is not None:
        length, reason = left_by(rule.fixed_tau), "fixed_tau"
    else:
        hi = max(1, math.floor(rule.beta * n + 1e-9))
        lo = min(hi, max(1, math.ceil(rule.alpha * n - 1e-9)))
        lengths = [left_by(tau) for tau in margins]  # between two margins nothing changes
        fitting = [length for length in lengths if lo <= length <= hi]
        if not fitting:
            length, reason = hi, "flat"
        else:
            length, reason = (max(fitting) if rule.pick == "longest" else min(fitting)), "breakpoint"

    cuts: list[tuple[int, str]] = []
    if rule.tau_floor is not None:
        cuts.append((left_by(rule.tau_floor), "tau_floor"))
    if stable is not None:
        cuts.append((next((place for place in range(n) if not stable[place]), n), "stability"))
    for at, why in cuts:
        if at < length:
            length, reason = at, why
    if length < least:
        length, reason = least, "min_commit"
    candidate = length

    # place l (from 1) ends on the token with index l - 1
    window = [place for place in range(1, candidate + 1) if candidate - place <= rule.lookback]
    delimiters = [place for place in window if is_delim[place - 1]] if rule.lookback else []
    if delimiters and max(delimiters) >= least:
        length, reason = max(delimiters), "delimiter"
    elif delimiters and length != least:
        length, reason = least, "min_commit"
    elif not delimiters and starts_word is not None:
        ends = [place for place in range(least, candidate + 1) if place == n or starts_word[place]]
        if ends and max(ends) != length:
            length, reason = max(ends), "word"
    elif not delimiters and rule.no_delimiter == "min" and rule.lookback and length != least:
        length, reason = least, "min_commit"

    if whole is not None:
        ends = [place for place in range(least, length + 1) if whole[place - 1]]
        if ends and max(ends) != length:
            length, reason = max(ends), "character"
    if is_eos is not None and any(is_eos[:length]):
        first = list(is_eos).index(True) + 1
        if first != length:
            length, reason = first, "eos"
    return LSPDecision(length, candidate, min(margins[:length]), reason == "delimiter", reason)
