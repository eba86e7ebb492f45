"""Which weights go under the matrix rule: those of linear layers inside the blocks; all others are Adam's."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from assay.methods.racs_alice._optimizer import ADAM_DEFAULTS

Method = Literal["racs", "alice", "alice-zero", "eigen-adam"]
DEFAULT_LR = {"racs": 0.02, "alice": 0.02, "alice-zero": 0.02, "eigen-adam": 1e-3}
HEADS = ("lm_head", "head", "classifier", "score", "embed_out", "output_projection", "output_layer", "qa_outputs")


def build_param_groups(
    model: nn.Module,
    method: Method,
    lr: float | None = None,
    adam_lr: float = 1e-3,
    last_layer: Literal["adam", "method"] = "adam",
    exclude: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Two parameter groups: the matrices of the blocks for the method, everything else for Adam at its own rate.

    Under the matrix rule: every 2-D weight of an `nn.Linear` (or transformers' `Conv1D`) that is not an output head.
    Under Adam: embeddings, norms, biases, convolutions, the head. A head is what ``model.get_output_embeddings()``
    returns, a layer that shares its weight with an embedding, or one named like a head; in a model that has none of
    these and does not say that it has no head, the last linear layer. Tied weights appear once, under Adam.

    Parameters
    ----------
    model
        Any module. Frozen parameters are left out.
    method : {"racs", "alice", "alice-zero", "eigen-adam"}
    lr
        Of the matrix rule; None for the method's default (0.02, Eigen-Adam 0.001).
    adam_lr
        Of the rest. A scheduler multiplies both.
    last_layer
        "method" puts an untied output head under the matrix rule too (the paper's table without a star).
    exclude
        Patterns (`fnmatch`) of parameter names that go to Adam: ``("*.router.weight",)``.

    Returns
    -------
    list of dict
        ``{"params", "param_names", "rule": "matrix", "lr"}`` and ``{"params", "param_names", "rule": "adam", "lr",
        "betas", "eps", "weight_decay"}``; an empty group is left out.

    Raises
    ------
    ValueError
        An unknown method, a pattern that matches nothing, a layer that has no shape yet (`nn.LazyLinear`), or a model
        without a matrix to put under the rule.
    """
    if method not in DEFAULT_LR:
        raise ValueError(f"method is one of {', '.join(DEFAULT_LR)}, got {method!r}")
    if last_layer not in ("adam", "method"):
        raise ValueError(f"last_layer is 'adam' or 'method', got {last_layer!r}")
    names = [name for name, _ in model.named_parameters()]
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"exclude={pattern!r} matches no parameter: patterns are those of fnmatch, over names like "
                f"{names[0] if names else 'encoder.weight (this model has none)'}"
            )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: call the model once before its parameters are sorted")

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    linear = {id(m.weight) for m in model.modules() if _is_linear(m)} - embeddings
    if last_layer == "adam":
        linear -= _heads(model)
    matrices: list[tuple[str, Any]] = []
    rest: list[tuple[str, Any]] = []
    for name, p in model.named_parameters():  # names a tied weight once
        if p.requires_grad:
            is_matrix = id(p) in linear and p.ndim == 2 and not any(fnmatchcase(name, pattern) for pattern in patterns)
            (matrices if is_matrix else rest).append((name, p))
    if not matrices:
        raise ValueError(
            f"{type(model).__name__} has no trainable linear layer besides its head: a matrix rule has nothing to do, use torch.optim.AdamW"
        )
    groups = [{**_listed(matrices), "rule": "matrix", "lr": DEFAULT_LR[method] if lr is None else lr}]
    if rest:
        groups.append({**_listed(rest), "rule": "adam", **ADAM_DEFAULTS, "lr": adam_lr})
    return groups


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _heads(model: nn.Module) -> set[int]:
    """The ids of the weights that make the model's output."""
    heads = {id(m.weight) for name, m in model.named_modules() if _is_linear(m) and name.split(".")[-1] in HEADS}
    says = getattr(model, "get_output_embeddings", None)
    if says is not None:
        head = says()
        return heads | ({id(head.weight)} if head is not None else set())
    if not heads:
        layers = [m for m in model.modules() if _is_linear(m)]
        heads = {id(layers[-1].weight)} if layers else set()
    return heads


def _listed(named: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"params": [p for _, p in named], "param_names": [name for name, _ in named]}
