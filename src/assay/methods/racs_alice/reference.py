"""The plain forms of the rules, as the paper prints them: what the fast ones must equal.

Everything is a function of (gradient, state) in the precision of the gradient, with m <= n; nothing is done in place.
"""

import torch
from jaxtyping import Float
from torch import Tensor

State = dict[str, Tensor]


def limiter(norm: Float[Tensor, ""], phi: Float[Tensor, ""], gamma: float) -> Float[Tensor, ""]:
    """eta = gamma / max(norm / phi, gamma), 1 where there is no phi yet."""
    return (
        gamma / torch.maximum(norm / phi, torch.tensor(gamma, dtype=norm.dtype)) if phi > 0 else torch.ones_like(norm)
    )


def racs_update(
    G: Float[Tensor, "m n"],
    state: State,
    *,
    beta: float = 0.9,
    gamma: float = 1.01,
    n_iters: int = 5,
    eps: float = 1e-30,
) -> tuple[Float[Tensor, "m n"], State]:
    """The update (before lr * alpha) and the next state ``{s, q, phi}``. Source: arXiv:2502.07752, Algorithm 1."""
    if not G.any():
        return torch.zeros_like(G), {"s": beta * state["s"], "q": beta * state["q"], "phi": state["phi"]}
    P = G**2
    q_now = torch.ones(len(G), dtype=G.dtype)
    for _ in range(n_iters):
        s_now = P.T @ q_now / (q_now @ q_now)
        q_now = P @ s_now / (s_now @ s_now)
    s = beta * state["s"] + (1 - beta) * s_now
    q = beta * state["q"] + (1 - beta) * q_now
    scaled = torch.diag((q + eps) ** -0.5) @ G @ torch.diag((s + eps) ** -0.5)
    eta = limiter(scaled.norm(), state["phi"], gamma)
    return eta * scaled, {"s": s, "q": q, "phi": eta * scaled.norm()}


def tracked_matrix(
    U: Float[Tensor, "m r"], G: Float[Tensor, "m n"], Q: Float[Tensor, "r r"] | None, beta3: float
) -> Float[Tensor, "m m"]:
    """Qrec = beta3 U Q U^T + (1 - beta3) G G^T, the dense matrix that the switch never forms; G G^T without tracking."""
    return G @ G.T if Q is None else beta3 * U @ Q @ U.T + (1 - beta3) * G @ G.T


def iterate_subspace(A: Float[Tensor, "m m"], U: Float[Tensor, "m r"]) -> Float[Tensor, "m r"]:
    """One step of subspace iteration, sorted by the eigenvalues of A in the new span. Source: Algorithm 3."""
    U1 = torch.linalg.qr(A @ U).Q
    values, vectors = torch.linalg.eigh(U1.T @ A @ U1)
    return U1 @ vectors[:, values.argsort(descending=True)]


def alice_update(
    G: Float[Tensor, "m n"],
    state: State,
    *,
    betas: tuple[float, float, float] = (0.9, 0.9, 0.999),
    alpha_c: float = 0.4,
    gamma: float = 1.01,
    compensation: str = "optimal",
    eps: float = 1e-8,
) -> tuple[Float[Tensor, "m n"], State]:
    """The update (before lr * alpha) and the next state, between two basis updates.

    Parameters
    ----------
    G : (m, n)
        Not all zero.
    state
        ``{U: (m, r), Q: (r, r) if tracked, M: (r, n), V: (r, n), p: (n,), phi: ()}``.

    Source: arXiv:2502.07752, Algorithms 4 and 10.
    """
    b1, b2, b3 = betas
    U = state["U"]
    m, r = U.shape
    sigma = U.T @ G
    new = dict(state)
    if "Q" in state:
        new["Q"] = b3 * state["Q"] + (1 - b3) * sigma @ sigma.T
    new["M"] = b1 * state["M"] + (1 - b1) * sigma
    new["V"] = b2 * state["V"] + (1 - b2) * sigma**2
    omega = new["M"] / (new["V"].sqrt() + eps)
    residual = G - U @ sigma
    # For orthonormal U this is the paper's colsum(G^2) - colsum(sigma^2). With Gaussian columns that difference can be
    # negative, and a scale made of its rounded-up zero would be 1e15: the residual itself is what is meant.
    new["p"] = b1 * state["p"] + (1 - b1) * (residual**2).sum(0)
    if compensation == "none":
        return U @ omega, new
    if compensation == "optimal":
        C = (m - r) ** 0.5 * residual @ torch.diag((new["p"] + 1e-30) ** -0.5)
    else:
        C = residual * (omega.norm(dim=0) / sigma.norm(dim=0))
    if compensation == "fira+":
        C = C * (U @ omega).norm() / C.norm()
    else:
        C = limiter(C.norm(), state["phi"], gamma) * C
    new["phi"] = C.norm()
    return U @ omega + (1.0 if compensation == "fira" else alpha_c) * C, new
