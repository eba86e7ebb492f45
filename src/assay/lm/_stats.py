"""Second moments of a layer's inputs, gathered batch by batch: all that a closed-form compression needs to know of the data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from assay._errors import InputError


class LayerStats:
    r"""Running second moments of the inputs of one Linear, and of how they differ from what the original network feeds it.

    With N tokens seen, x the input in the network that is being compressed and x_ref that of the original one on the same
    tokens,

        H = 2/N sum x x^T          Delta = 2/N sum (x_ref - x) x^T

    whatever the batches were. No activation is kept.

    Parameters
    ----------
    features
        Of an input, n.
    dtype
        Of the sums: float32 or float64. Inputs are cast to it before they are multiplied.
    device
        Where they are kept.

    Attributes
    ----------
    H, Delta : (n, n)
        ``Delta`` stays zero where no reference is given.
    mean_abs : (n,)
        Mean of \|x\| by input.
    n
        Tokens seen.

    Source: arXiv:2602.03051, Algorithm 1.
    """

    def __init__(self, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        if features < 1:
            raise InputError(f"a layer of {features} inputs has no second moments: give at least one")
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"second moments in {dtype} lose what is small: use torch.float32 or torch.float64")
        self.H = torch.zeros(features, features, dtype=dtype, device=device)
        self.Delta = torch.zeros_like(self.H)
        self.mean_abs = torch.zeros_like(self.H[0])
        self.n = 0

    @torch.no_grad()
    def update(
        self,
        x: Float[Tensor, "*tokens n"],
        x_ref: Float[Tensor, "*reference n_ref"] | None = None,
        mask: Bool[Tensor, "*masked"] | None = None,
    ) -> None:
        """Add a batch.

        Parameters
        ----------
        x, x_ref : (..., n)
            Inputs, and those of the original network.
        mask : (...,)
            True at tokens that count; padding is False.

        Raises
        ------
        InputError
            If the shapes do not fit, or a value that counts is not finite: nothing is added then.
        """
        features = self.H.shape[0]
        if x.shape[-1] != features or (x_ref is not None and x_ref.shape != x.shape):
            shapes = str(tuple(x.shape)) + ("" if x_ref is None else f" and {tuple(x_ref.shape)}")
            raise InputError(
                f"inputs of the shape {shapes} came to a layer of {features} inputs: give (..., {features})"
            )
        if mask is not None and mask.shape != x.shape[:-1]:
            raise InputError(f"a mask of the shape {tuple(mask.shape)} does not fit tokens of {tuple(x.shape[:-1])}")
        rows = self._rows(x, mask)
        reference = rows if x_ref is None else self._rows(x_ref, mask)
        if not len(rows):
            return
        if not (bool(rows.isfinite().all()) and bool(reference.isfinite().all())):
            raise InputError("an input of the calibration is not finite: look for NaN in the weights, or use float32")
        share = self.n / (self.n + len(rows))
        self.n += len(rows)
        scaled = rows * (2 / self.n) ** 0.5
        self.H.mul_(share).addmm_(scaled.T, scaled)
        self.mean_abs.mul_(share).add_(rows.abs().sum(0), alpha=1 / self.n)
        if x_ref is not None:
            self.Delta.mul_(share).addmm_((reference * (2 / self.n) ** 0.5 - scaled).T, scaled)
        else:
            self.Delta.mul_(share)

    def merge(self, other: LayerStats) -> LayerStats:
        """The moments of both, as one that saw all tokens would have them."""
        if other.H.shape != self.H.shape:
            raise InputError(f"layers of {self.H.shape[0]} and {other.H.shape[0]} inputs have no moments in common")
        both = LayerStats(self.H.shape[0], self.H.dtype, self.H.device)
        both.n = self.n + other.n
        if both.n:
            both.H = (self.H * self.n + other.H.to(self.H) * other.n) / both.n
            both.Delta = (self.Delta * self.n + other.Delta.to(self.H) * other.n) / both.n
            both.mean_abs = (self.mean_abs * self.n + other.mean_abs.to(self.H) * other.n) / both.n
        return both

    def all_reduce(self) -> None:
        """Make them, in place, the moments of what all processes of ``torch.distributed`` saw."""
        count = torch.tensor(float(self.n), dtype=torch.float64, device=self.H.device)
        own = float(self.n)
        dist.all_reduce(count)
        for part in (self.H, self.Delta, self.mean_abs):
            part.mul_(own / max(float(count), 1.0))
            dist.all_reduce(part)
        self.n = int(count)

    def to(self, device: torch.device | str) -> LayerStats:
        """Move to a device, in place."""
        self.H, self.Delta, self.mean_abs = self.H.to(device), self.Delta.to(device), self.mean_abs.to(device)
        return self

    def _rows(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]) if mask is None else x[mask.to(x.device)]
        return rows.to(device=self.H.device, dtype=self.H.dtype)
