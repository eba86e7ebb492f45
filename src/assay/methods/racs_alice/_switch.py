"""The low-rank basis of Alice: one step of subspace iteration, then an exchange of its trailing columns."""

import hashlib
import struct
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Switch = Literal["complement", "full-basis", "gaussian", "gaussian-mix", "none"]
Complement = Literal["qr", "gaussian"]
SWITCHES = ("complement", "full-basis", "gaussian", "gaussian-mix", "none")


def draw_generator(seed: int, index: int, t: int) -> torch.Generator:
    """A generator that depends on (seed, tensor index, step) alone.

    Nothing to save, the same on every rank and device, the same after a restart: draws are made on the CPU.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, index, t), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


def leading_singular_vectors(G: Float[Tensor, "m n"], rank: int) -> Float[Tensor, "m r"]:
    """The left singular vectors of the ``rank`` largest singular values: the basis before there is one to iterate from."""
    return torch.linalg.svd(torch.nan_to_num(G, posinf=0.0, neginf=0.0), full_matrices=False).U[:, :rank]


def iterate_subspace(
    U: Float[Tensor, "m r"], G: Float[Tensor, "m n"], Q: Float[Tensor, "r r"] | None, beta3: float
) -> Float[Tensor, "m r"]:
    """One step of subspace iteration on A = beta3 U Q U^T + (1 - beta3) G G^T, from U; A is never formed.

    Parameters
    ----------
    U : (m, r)
        The basis so far, r <= m.
    G : (m, n)
        The gradient.
    Q : (r, r) or None
        The tracked second moment in the basis U; None (no tracking) means A = G G^T.
    beta3
        Weight of the tracked part.

    Returns
    -------
    (m, r)
        Orthonormal columns, the eigenvalues of A restricted to their span falling. Signs are free.

    Source: arXiv:2502.07752, Algorithm 3. The paper prints U = EVD(V) for the small matrix V = U1^T A U1; the shapes ask
    for U1 times its eigenvectors. Cost: two products m n r and a few m r^2.
    """
    H = G @ (G.mT @ U)
    if Q is not None:
        H = (1 - beta3) * H + beta3 * (U @ (Q @ (U.mT @ U)))
    U1 = torch.linalg.qr(H).Q
    S = U1.mT @ G
    small = S @ S.mT
    if Q is not None:
        B = U1.mT @ U
        small = (1 - beta3) * small + beta3 * (B @ Q @ B.mT)
    eigenvectors = torch.linalg.eigh(torch.nan_to_num(small, posinf=0.0, neginf=0.0)).eigenvectors
    return U1 @ eigenvectors.flip(-1)


def exchange_columns(
    U: Float[Tensor, "m r"],
    leading: int,
    kind: Switch,
    generator: torch.Generator,
    complement: Complement = "qr",
) -> Float[Tensor, "m r"]:
    """Keep the first ``leading`` columns of an orthonormal basis and draw the others anew.

    Parameters
    ----------
    U : (m, r)
        Orthonormal, sorted.
    leading
        How many columns stay, at most r. Where the complement has fewer than r - leading vectors, more of them stay.
    kind
        "complement": from the m - r vectors that complete U to a basis (the paper's);
        "full-basis": from all m - leading vectors of the completed basis but the leading ones;
        "gaussian-mix": Gaussian columns of unit norm; "gaussian": the same for all r columns;
        "none": U as it is.
    generator
        On the CPU.
    complement
        "qr": the vectors of a complete QR of U, r - leading of them without replacement (the paper's);
        "gaussian": a uniformly random subspace of the complement, for r << m without the m x m matrix of a complete QR.

    Returns
    -------
    (m, r); orthonormal but for the two Gaussian kinds.

    Source: arXiv:2502.07752, Algorithm 2 and the ablation of Section 6.3.
    """
    m, r = U.shape
    if kind == "none":
        return U
    if kind in ("gaussian", "gaussian-mix"):
        keep = 0 if kind == "gaussian" else leading
        drawn = torch.randn(m, r - keep, generator=generator).to(U)
        return torch.cat([U[:, :keep], drawn / drawn.norm(dim=0)], dim=1)
    if kind == "full-basis":
        drawn = leading + _draw(m - leading, r - leading, generator)  # a column of U below r, of the complement above
        inside, outside = drawn[drawn < r].to(U.device), drawn[drawn >= r] - r
        return torch.cat([U[:, :leading], U[:, inside], _complement(U, outside)], dim=1)
    keep = max(leading, 2 * r - m)
    if keep == r:
        return U
    if complement == "gaussian":
        drawn = torch.randn(m, r - keep, generator=generator).to(U)
        for _ in range(2):  # twice is enough: what rounding left of U goes with the second pass
            drawn = torch.linalg.qr(drawn - U @ (U.mT @ drawn)).Q
        return torch.cat([U[:, :keep], drawn], dim=1)
    return torch.cat([U[:, :keep], _complement(U, _draw(m - r, r - keep, generator))], dim=1)


def _complement(U: Float[Tensor, "m r"], columns: Tensor) -> Float[Tensor, "m c"]:
    """Some of the m - r orthonormal vectors that complete U to a full basis.

    They are columns r, r + 1, ... of the Q of a complete QR decomposition, but that m x m matrix is never formed: its
    Householder reflections are applied to the unit vectors of the columns that are wanted.
    """
    m, r = U.shape
    units = U.new_zeros(m, len(columns))
    units[r + columns.to(U.device), torch.arange(len(columns), device=U.device)] = 1
    reflections, tau = torch.geqrf(U)
    return torch.ormqr(reflections, tau, units)


def _draw(total: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of the numbers below ``total``, uniformly and without replacement."""
    return torch.randperm(total, generator=generator)[:count]
