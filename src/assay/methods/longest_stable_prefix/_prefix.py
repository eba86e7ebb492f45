"""How many places of the active suffix are committed: the longest stable prefix, snapped to a delimiter."""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError

Pick = Literal["longest", "strict"]
NoDelimiter = Literal["keep", "min"]
#: What decided the length, in the order in which the rules act.
Reason = Literal[
    "breakpoint", "flat", "fixed_tau", "tau_floor", "stability", "min_commit", "delimiter", "word", "character", "eos"
]
REASONS: tuple[str, ...] = Reason.__args__  # type: ignore[attr-defined]
_DELIMITER = REASONS.index("delimiter")
_SLACK = 1e-9  # 0.25 * 12 is 3, whatever the last bit says


@dataclass(frozen=True, kw_only=True)
class PrefixRule:
    """The settings of `longest_stable_prefix`, checked; see there.

    Parameters
    ----------
    alpha, beta, min_commit, lookback, pick, tau_floor, no_delimiter
        As for `longest_stable_prefix`.
    fixed_tau
        A threshold in place of the adaptive one: alpha, beta and pick then do nothing.
    """

    alpha: float = 0.25
    beta: float = 0.5
    min_commit: int = 1
    lookback: int = 16
    pick: Pick = "longest"
    tau_floor: float | None = None
    no_delimiter: NoDelimiter = "keep"
    fixed_tau: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= self.beta <= 1:
            raise InputError(
                f"alpha is {self.alpha} and beta {self.beta}, expected 0 < alpha <= beta <= 1: the shares of the active "
                "places that a step commits at least and at most"
            )
        require_whole("min_commit", self.min_commit, 1, "at least 1: fewer would never end")
        require_whole("lookback", self.lookback, 0, "0 (no snapping) or more places")
        for name, value, known in (
            ("pick", self.pick, ("longest", "strict")),
            ("no_delimiter", self.no_delimiter, ("keep", "min")),
        ):
            if value not in known:
                raise InputError(f"{name} is {value!r}, expected {known[0]!r} or {known[1]!r}: choose one of them")
        for name, number in (("tau_floor", self.tau_floor), ("fixed_tau", self.fixed_tau)):
            if number is not None and math.isnan(number):
                raise InputError(f"{name} is not a number: give a gap between logits, such as 3.0")


def require_whole(name: str, value: Any, least: int, expected: str) -> None:
    """Raises InputError unless the value is a whole number and not below ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r}, expected a whole number, {expected}")
    if int(value) < least:
        raise InputError(f"{name} is {value}, expected {expected}")


@dataclass(frozen=True)
class LSPDecision:
    """What one step commits.

    Attributes
    ----------
    length
        L: this many leading places.
    candidate
        L', the length before snapping.
    tau
        The smallest margin among the committed places.
    snapped
        The block ends on a delimiter found in the lookback window.
    reason
        The rule that had the last word: ``"breakpoint"`` (the adaptive threshold), ``"flat"`` (no threshold separates
        places in the range), ``"fixed_tau"``, ``"tau_floor"``, ``"stability"``, ``"min_commit"``, ``"delimiter"``; from
        the scheduler also ``"word"``, ``"character"`` and ``"eos"``.
    """

    length: int
    candidate: int
    tau: float
    snapped: bool
    reason: str


def longest_stable_prefix(
    margins: Float[Tensor, "N"],
    stable: Bool[Tensor, "N"] | None,
    is_delim: Bool[Tensor, "N"],
    *,
    alpha: float = 0.25,
    beta: float = 0.5,
    min_commit: int = 1,
    lookback: int = 16,
    pick: Pick = "longest",
    tau_floor: float | None = None,
    no_delimiter: NoDelimiter = "keep",
) -> LSPDecision:
    """How many leading places of the active suffix to commit at once.

    The running minimum m of the margins is a falling staircase. A threshold tau leaves the places before m falls under
    it; an adaptive tau is chosen so that their number lies in [ceil(alpha N), floor(beta N)]. Cut then by ``tau_floor``
    and by the first place whose prediction has changed, raised to ``min_commit``, and snapped back to a delimiter.

    Parameters
    ----------
    margins : (N,)
        Gap between the two largest raw logits at each place, from the boundary on. Infinite ones count as the largest
        number.
    stable : (N,) or None
        Whether the place's prediction has held. None: all have.
    is_delim : (N,)
        Whether the predicted token is a delimiter.
    alpha, beta
        The least and the largest share of the N places to commit, 0 < alpha <= beta <= 1.
    min_commit
        L_min: at least so many places (or all, if there are fewer).
    lookback
        W: a delimiter at most so many places back from the candidate ends the block. 0: no snapping.
    pick
        ``"longest"``: the largest length in the range at which m drops; ``"strict"``: the smallest.
    tau_floor
        No place beyond ``min_commit`` is committed whose m is below it, even if fewer than alpha N remain. In logits.
    no_delimiter
        Without a delimiter in the window: ``"keep"`` the candidate, or fall back to ``"min"``, the formula read literally
        (which gives up the geometric decay).

    Returns
    -------
    LSPDecision
        Length 0 only if N is 0.

    Raises
    ------
    InputError
        If a setting is out of its range, shapes or dtypes do not fit, or a margin is NaN.

    Source: Li et al. 2026 (LSP, arXiv:2603.05454): margin, adaptive threshold, snapping. The tie rule, `tau_floor` and
    the order of the cuts are ours.
    """
    rule = PrefixRule(
        alpha=alpha, beta=beta, min_commit=min_commit, lookback=lookback, pick=pick, tau_floor=tau_floor,
        no_delimiter=no_delimiter,
    )  # fmt: skip
    if margins.ndim != 1:
        raise InputError(f"margins have shape {tuple(margins.shape)}, expected (N,): decide one row at a time")
    n = len(margins)
    for name, flags in (("stable", stable), ("is_delim", is_delim)):
        if flags is not None and (flags.shape != margins.shape or flags.dtype != torch.bool):
            raise InputError(
                f"{name} is {flags.dtype} of shape {tuple(flags.shape)} beside {n} margins, expected bool ({n},): give one "
                "True or False a place"
            )
    if bool(margins.isnan().any()):
        raise InputError("a margin is NaN: the logits are not finite, or a place has fewer than two tokens left")
    if n == 0:
        return LSPDecision(0, 0, math.inf, False, "flat")
    rows = decide(
        rule,
        margins[None],
        None if stable is None else stable[None],
        is_delim[None],
        torch.tensor([n], device=margins.device),
    )
    length, candidate, snapped, reason, tau = rows.packed[0].tolist()
    return LSPDecision(int(length), int(candidate), tau, bool(snapped), REASONS[int(reason)])


@dataclass(frozen=True, eq=False)
class Decisions:
    """`LSPDecision` of each row, on the device of the margins. Reasons are numbers into `REASONS`."""

    length: Int[Tensor, "B"]
    candidate: Int[Tensor, "B"]
    tau: Float[Tensor, "B"]
    snapped: Bool[Tensor, "B"]
    reason: Int[Tensor, "B"]

    @property
    def packed(self) -> Float[Tensor, "B 5"]:
        """Length, candidate, snapped, reason, tau: all in one tensor, so that one copy to the CPU brings everything."""
        return torch.stack([x.double() for x in (self.length, self.candidate, self.snapped, self.reason, self.tau)], 1)


def decide(
    rule: PrefixRule,
    margins: Float[Tensor, "B w"],
    stable: Bool[Tensor, "B w"] | None,
    is_delim: Bool[Tensor, "B w"],
    count: Int[Tensor, "B"],
    *,
    starts_word: Bool[Tensor, "B w"] | None = None,
    whole: Bool[Tensor, "B w"] | None = None,
    is_eos: Bool[Tensor, "B w"] | None = None,
) -> Decisions:
    """`longest_stable_prefix` of many rows at once, without waiting for the device.

    Parameters
    ----------
    rule
        The settings.
    margins, stable, is_delim : (B, w)
        As there, a row each; what lies beyond a row's count is ignored. NaN counts as 0.
    count : (B,)
        N of each row; 0 gives length 0.
    starts_word : (B, w), optional
        Whether the predicted token starts a new word: without a delimiter in the window the block then ends before the
        last such token.
    whole : (B, w), optional
        Whether the text up to this place ends on a whole character: the block shrinks to such a place, unless there is
        none from ``min_commit`` on.
    is_eos : (B, w), optional
        The block is cut behind its first EOS.
    """
    place = torch.arange(1, margins.shape[1] + 1, device=margins.device)
    inside = place <= count[:, None]
    widest = torch.finfo(torch.float32).max
    gaps = torch.nan_to_num(margins.float(), nan=0.0, posinf=widest, neginf=-widest)
    running = gaps.masked_fill(~inside, -torch.inf).cummin(1).values
    least = torch.minimum(count, torch.full_like(count, rule.min_commit))

    def last(chosen: Bool[Tensor, "B w"]) -> Int[Tensor, "B"]:
        return torch.where(chosen, place, 0).amax(1)

    if rule.fixed_tau is None:
        length, reason = _adaptive(rule, running, count, place)
    else:
        length = (running >= rule.fixed_tau).sum(1)
        reason = torch.full_like(count, REASONS.index("fixed_tau"))

    def cut(at: Int[Tensor, "B"], why: str) -> None:
        nonlocal length, reason
        reason = torch.where(at != length, REASONS.index(why), reason)
        length = at

    if rule.tau_floor is not None:
        cut(torch.minimum(length, (running >= rule.tau_floor).sum(1)), "tau_floor")
    if stable is not None:
        cut(torch.minimum(length, (stable & inside).long().cumprod(1).sum(1)), "stability")
    cut(torch.minimum(torch.maximum(length, least), count), "min_commit")
    candidate = length

    none = torch.ones_like(inside[:, 0])  # no delimiter in the window
    upto = inside & (place <= candidate[:, None])
    if rule.lookback:
        found = last(is_delim & upto & (place >= candidate[:, None] - rule.lookback))
        none = found == 0
        cut(torch.where(none, length, torch.maximum(found, least)), "min_commit")
        reason = torch.where(~none & (found >= least), _DELIMITER, reason)
        if rule.no_delimiter == "min" and starts_word is None:
            cut(torch.where(none, least, length), "min_commit")
    if starts_word is not None:
        before_word = torch.nn.functional.pad(starts_word[:, 1:], (0, 1), value=True) | (place == count[:, None])
        at = last(before_word & upto & (place >= least[:, None]))
        cut(torch.where(none & (at > 0), at, length), "word")
    if whole is not None:
        at = last(whole & (place <= length[:, None]) & (place >= least[:, None]) & inside)
        cut(torch.where(at > 0, at, length), "character")
    if is_eos is not None:
        ends = is_eos & (place <= length[:, None])
        at = torch.where(ends, place, len(place) + 1).amin(1)
        cut(torch.minimum(length, at), "eos")
    tau = running.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
    return Decisions(length, candidate, tau, reason == _DELIMITER, reason)


def _adaptive(
    rule: PrefixRule, running: Float[Tensor, "B w"], count: Int[Tensor, "B"], place: Int[Tensor, "w"]
) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"]]:
    """The length that the adaptive threshold leaves, and why."""
    hi = (rule.beta * count.double() + _SLACK).floor().long().clamp(min=1)
    lo = torch.minimum((rule.alpha * count.double() - _SLACK).ceil().long().clamp(min=1), hi)
    # A length is reachable if some threshold separates its last place from the next, or if there is no next.
    following = torch.nn.functional.pad(running[:, 1:], (0, 1), value=-torch.inf)
    reachable = (following < running) & (place >= lo[:, None]) & (place <= hi[:, None])
    if rule.pick == "longest":
        length = torch.where(reachable, place, 0).amax(1)
    else:
        length = torch.where(reachable, place, len(place) + 1).amin(1)
    flat = ~reachable.any(1)
    length = torch.where(flat, hi, length)
    return torch.minimum(length, count), torch.where(flat, REASONS.index("flat"), REASONS.index("breakpoint"))
