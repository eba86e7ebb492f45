"""The clipped objective on trace rows, and the clipped regression of the value model."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from assay._errors import InputError

Normalize = Literal["step", "length"]
KLNormalize = Literal["step", "length", "sum"]
LARGEST = 10.0  # of a log-ratio


def trace_policy_loss(
    logp_new: Float[Tensor, "R L1"],
    logp_old: Float[Tensor, "R L1"],
    adv: Float[Tensor, "R _"],
    p_mask: Bool[Tensor, "R L1"],
    *,
    eps: float = 0.2,
    beta: float = 0.01,
    normalize: Normalize | str = "step",
    length: int | None = None,
    kl_normalize: KLNormalize | str | None = None,
    logp_ref: Float[Tensor, "R L1"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Clipped policy objective plus a penalty on the way from another policy, as a mean over rows.

    With rho = exp(logp_new - logp_old) a row's loss is the sum over its targets of -min(rho A, clip(rho, 1 - eps, 1 + eps) A),
    divided by their number ("step") or by the padded response length ("length"). The penalty is beta (exp(t) - 1 - t),
    t = logp_ref - logp_new, at the same targets. Log-ratios are cut to [-10, 10], where their gradient ends.

    Parameters
    ----------
    logp_new, logp_old : (R, L1)
        Log-probabilities of the labels, under the policy that is trained and under the one that it started from in this
        step; read at targets only.
    adv : (R, L1), or (R, 1)
        Advantages.
    p_mask : (R, L1)
        Targets.
    eps
        Of the clip.
    beta
        Weight of the penalty; 0: none.
    normalize
        "step": the paper's 1 / (tokens of the step), default for full attention; "length": the released block code's 1 / L1.
        The two differ by orders of magnitude in the size of an update.
    length
        L1 of "length"; None: the columns given.
    kl_normalize
        Of the penalty. None: as released, L1 with "length" and the plain "sum" with "step".
    logp_ref : (R, L1) or None
        Policy that the penalty pulls to; None: the old one.

    Returns
    -------
    loss, metrics
        Metrics over targets: ``ratio`` (mean), ``clipped`` (share where the clip took the gradient away), ``kl`` (mean of the
        penalty's estimate), ``cut`` (share of log-ratios beyond 10).

    Raises
    ------
    FloatingPointError
        If a log-probability at a target is not finite: the message names the row.

    Source: arXiv:2509.06949, equations 3 and 4; the cut of the ratio is in the released block code only. Where t is beyond 10
    the released code cuts it in the exponential and not in the linear term; here it is cut in both.
    """
    _finite(logp_new, p_mask, "new")
    _finite(logp_old, p_mask, "old")
    length = p_mask.shape[1] if length is None else length
    zero = logp_new.new_zeros(())
    change = torch.where(p_mask, logp_new - logp_old, zero)
    ratio = change.clamp(-LARGEST, LARGEST).exp()
    clipped = ratio.clamp(1 - eps, 1 + eps)
    adv = adv.expand_as(ratio)
    gain = torch.where(p_mask, torch.minimum(ratio * adv, clipped * adv), zero)
    row = -gain.sum(1) / _scale(p_mask, normalize, length, "normalize")

    reference = logp_old if logp_ref is None else logp_ref
    distance = k3(torch.where(p_mask, reference - logp_new, zero))
    if beta:
        by = kl_normalize or ("length" if normalize == "length" else "sum")
        row = row + beta * distance.sum(1) / _scale(p_mask, by, length, "kl_normalize")
    count = p_mask.sum().clamp(min=1)
    with torch.no_grad():
        taken = p_mask & ((adv > 0) & (ratio > 1 + eps) | (adv < 0) & (ratio < 1 - eps))
        metrics = {
            "ratio": float((ratio * p_mask).sum() / count),
            "clipped": float(taken.sum() / count),
            "kl": float(distance.sum() / count),
            "cut": float((change.abs() > LARGEST).sum() / count),
        }
    return row.mean(), metrics


def k3(t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(t) - 1 - t with t cut to [-10, 10]: an estimate of the KL divergence that is never negative.

    t is log p_ref - log p of a token drawn from p. Source: Schulman 2020, "Approximating KL divergence", k3.
    """
    t = t.clamp(-LARGEST, LARGEST)
    return torch.expm1(t) - t


def value_loss(
    values: Float[Tensor, "R L1"],
    old_values: Float[Tensor, "R L1"],
    returns: Float[Tensor, "R L1"],
    p_mask: Bool[Tensor, "R L1"],
    *,
    eps: float = 0.2,
    length: int | None = None,
) -> Float[Tensor, ""]:
    """Half the larger of the squared errors of V and of V kept within eps of its old value; / L1 a row, mean over rows.

    Parameters
    ----------
    values, old_values, returns : (R, L1)
        New and old values and what they should be; read at targets only.
    p_mask : (R, L1)
        Targets.
    eps
        How far a value may move before its gradient ends.
    length
        L1; None: the columns given.

    Source: arXiv:2509.06949, equation 8.
    """
    near = old_values + (values - old_values).clamp(-eps, eps)
    error = torch.maximum((values - returns).square(), (near - returns).square())
    error = torch.where(p_mask, error, values.new_zeros(()))
    return (0.5 * error.sum(1) / (p_mask.shape[1] if length is None else length)).mean()


def _scale(p_mask: Tensor, by: str, length: int, name: str) -> Tensor | int:
    if by == "step":
        return p_mask.sum(1).clamp(min=1)
    if by == "length":
        return length
    if by == "sum" and name == "kl_normalize":
        return 1
    raise InputError(f"{name} is {by!r}, expected 'step' or 'length'" + (" or 'sum'" if name != "normalize" else ""))


def _finite(logp: Tensor, p_mask: Tensor, which: str) -> None:
    bad = p_mask & ~logp.detach().isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise FloatingPointError(
            f"the {which} log-probability of row {row}, position {column} is not finite: look for NaN in the weights, or "
            "use bfloat16 or float32 in place of float16"
        )
