"""A whole model, block by block, with any of the methods."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from assay._errors import InputError
from assay.lm._blocks import bias_of, blocks, groups, replace, weight_of
from assay.lm._calibrate import Batch, Site, Tokenizer, walk, windows
from assay.lm._fisher import feature_importance
from assay.lm._lowrank import Factors, LowRankLinear, asvd_factors, fwsvd_factors, rank_for, svd_factors
from assay.lm._report import CompressionReport, size
from assay.methods.saes_svd._closed import FactorResult, Whitened, factorise
from assay.methods.saes_svd.baselines import adasvd_factors, adasvd_ratios, learn_ranks

log = logging.getLogger("assay.lm")

METHODS = ("svd", "fwsvd", "asvd", "svd-llm", "adasvd", "dobi", "cealc", "saes-svd")

_CHOICE = ("bounds", "bounds_on", "refine", "cap", "shrink", "objective")
_MOMENTS = ("ridge", "ridge_target", "whitener")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "svd": (),
    "fwsvd": (),
    "asvd": ("power",),
    "svd-llm": ("ridge", "whitener", "inputs"),
    "adasvd": ("ridge", "whitener", "sweeps"),
    "dobi": ("steps", "autocast"),
    "cealc": ("beta", *_MOMENTS),
    "saes-svd": ("beta", *_MOMENTS, *_CHOICE),
}


def compress_model(
    model: nn.Module,
    calibration: Tensor | Sequence[Batch] | Sequence[str] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    method: str = "saes-svd",
    ratio: float = 0.2,
    targets: Sequence[str] | None = None,
    n_samples: int = 256,
    seq_len: int = 2048,
    batch_size: int = 8,
    device: torch.device | str | None = None,
    offload: str | None = None,
    limit: int | None = None,
    max_token_weight: float | None = None,
    source: str = "the given text",
    seed: int = 0,
    on_block: Callable[[int, int], None] | None = None,
    **options: Any,
) -> CompressionReport:
    """Replace the Linears of a causal language model's blocks by two thin ones each, in place. No training.

    Parameters
    ----------
    model
        Of transformers: LLaMA, Mistral, Qwen, SmolLM, OPT, GPT-2, or any with ``targets`` named. Embeddings and head stay.
    calibration
        Token ids (rows, tokens), batches with ``input_ids`` and ``attention_mask``, or texts with a tokenizer. ``"svd"`` needs none.
    tokenizer
        For texts.
    n_samples, seq_len, seed
        So many windows of so many tokens are cut from texts, chosen by the seed.
    method
        ``"saes-svd"``, its fixed-weight form ``"cealc"`` (with ``beta=``), or a rival: ``"svd"``, ``"fwsvd"``, ``"asvd"``,
        ``"svd-llm"``, ``"adasvd"``, ``"dobi"``.
    ratio
        Share of the parameters of these Linears to remove, in (0, 1), the same for each (but for the last two).
    targets
        Ends of the names of the Linears, where not all are wanted or the layout is not known.
    batch_size
        Rows of calibration at once.
    device, offload
        Where blocks are worked on, and where the hidden states wait: None, ``"cpu"``, ``"disk"``; see `assay.lm.walk`.
    limit
        Compress only so many blocks.
    max_token_weight
        Tokens longer than so many times the median are cut to it before they count; None: as they are.
    source
        Of the calibration, for the report.
    on_block
        Told the number of the block that is done, and of how many.
    **options
        Those of `cealc`; ``inputs="compressed"|"original"`` (svd-llm), ``sweeps`` (adasvd), ``power`` (asvd), ``steps`` (dobi).

    Returns
    -------
    CompressionReport

    Raises
    ------
    InputError
        If the ratio is not in (0, 1), the model is compressed already, the calibration lacks or has a value that is not
        finite (with the layer's name), or an option is not one of the method's.
    TypeError
        If the weights are quantised.

    Source: arXiv:2602.03051, Algorithm 1.
    """
    begin = time.perf_counter()
    if method not in METHODS:
        raise InputError(f"the method is {method!r}: give one of {', '.join(METHODS)}")
    if not 0 < ratio < 1:
        raise InputError(f"the ratio is {ratio}, the share of parameters to remove: give a number between 0 and 1")
    if unknown := sorted(set(options) - set(_OPTIONS[method])):
        raise InputError(f"{method} has no option {unknown[0]!r}: it has {', '.join(_OPTIONS[method]) or 'none'}")
    if method == "cealc" and "beta" not in options:
        raise InputError("cealc needs beta=, a number in [0, 1): or take method='saes-svd', which chooses it")
    _check_model(model)
    before = size(model)
    rows = _rows(calibration, tokenizer, n_samples, seq_len, seed) if method != "svd" else None
    batches: list[Batch] = [] if rows is None else _batched(rows, batch_size)
    report = CompressionReport(
        method,
        {
            "ratio": ratio,
            "targets": None if targets is None else list(targets),
            **{k: _plain(v) for k, v in options.items()},
        },
        "nothing" if not batches else f"{source}, {_tokens(batches):,} tokens",
        seed,
    )
    job = _Job(model, batches, method, ratio, options, report)
    job.run(
        {
            "targets": targets,
            "limit": limit,
            "clip": max_token_weight,
            "device": device,
            "offload": offload,
        },
        on_block,
    )
    after = size(model)
    report.parameters, report.bytes = (before[0], after[0]), (before[1], after[1])
    report.seconds = time.perf_counter() - begin
    return report


class _Job:
    """One call of `compress_model`."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        method: str,
        ratio: float,
        options: dict[str, Any],
        report: CompressionReport,
    ) -> None:
        self.model, self.batches, self.method, self.ratio = model, batches, method, ratio
        self.options, self.report = options, report
        self.count = _tokens(batches)
        self.warned: set[int] = set()
        self.shared: tuple[Any, Whitened] | None = None  # the moments of the group that is being worked on
        self.cosines: list[float] = []

    def run(self, walking: dict[str, Any], on_block: Callable[[int, int], None] | None) -> None:
        def done(number: int, count: int, cosine: float | None) -> None:
            if cosine is not None:
                self.cosines.append(cosine)
            if on_block is not None:
                on_block(number, count)

        if self.method in ("svd", "fwsvd"):
            self._without_walking(walking, done)
        elif self.method == "asvd":
            walk(self.model, self.batches, self._asvd, inputs="original", on_block=done, **walking)
        elif self.method == "svd-llm":
            inputs = self.options.get("inputs", "compressed")
            walk(self.model, self.batches, self._closed, inputs=inputs, reference=False, on_block=done, **walking)
        elif self.method == "adasvd":
            ratios = adasvd_ratios(self.model, [_ids(b) for b in self.batches], self.ratio)
            self.report.settings["ratios"] = ratios
            walk(
                self.model,
                self.batches,
                lambda s: self._ada(s, ratios[s.block]),
                reference=False,
                on_block=done,
                **walking,
            )
        elif self.method == "dobi":
            self._dobi(walking, done)
        else:
            walk(self.model, self.batches, self._closed, on_block=done, **walking)
        self.report.cosine = self.cosines

    def _without_walking(self, walking: dict[str, Any], done: Callable[[int, int, float | None], None]) -> None:
        them = list(blocks(self.model))[: walking["limit"]]
        wanted = [
            (number, name, linear)
            for number, block in enumerate(them)
            for group in groups(block)
            for name, linear in group.items()
            if walking["targets"] is None or any(f".{name}".endswith(f".{t}") for t in walking["targets"])
        ]
        importance: dict[nn.Module, Tensor] = {}
        if self.method == "fwsvd":
            rows = [row for batch in self.batches for row in _ids(batch)]
            importance = feature_importance(self.model, rows, [linear for _, _, linear in wanted])
        for at, (number, name, linear) in enumerate(wanted):
            made = self._made(number, name, linear, partial(self._plain_factors, importance.get(linear)))
            if made is not None:
                replace(them[number], name, made)
            if at + 1 == len(wanted) or wanted[at + 1][0] != number:
                done(number, len(them), None)

    def _plain_factors(self, importance: Tensor | None, W: Tensor, rank: int) -> tuple[Factors, dict[str, Any]]:
        return svd_factors(W, rank) if importance is None else fwsvd_factors(W, importance, rank), {}

    def _asvd(self, site: Site) -> nn.Module | None:
        return self._made(
            site.block,
            site.name,
            site.linear,
            lambda W, r: (asvd_factors(W, site.stats.mean_abs.to(W.device), r, **self.options), {}),
        )

    def _closed(self, site: Site) -> nn.Module | None:
        def factors(W: Tensor, rank: int) -> tuple[Factors, dict[str, Any]]:
            options = {k: v for k, v in self.options.items() if k in ("beta", *_CHOICE)}
            beta = 0.0 if self.method == "svd-llm" else options.pop("beta", "aces")
            found: FactorResult = factorise(W, self._moments(site), rank, beta=beta, **options)
            return Factors(found.A, found.B), {
                "beta": found.beta,
                "beta_irrelevant": found.beta_irrelevant,
                "retained": found.retained,
                "rho_surrogate": found.rho_surrogate,
                "local": found.local,
                "alignment": found.alignment,
                "ridge": found.ridge_used,
            }

        return self._made(site.block, site.name, site.linear, factors, site)

    def _ada(self, site: Site, ratio: float) -> nn.Module | None:
        return self._made(
            site.block,
            site.name,
            site.linear,
            lambda W, r: (adasvd_factors(W, self._moments(site), r, self.options.get("sweeps", 3)), {}),
            site,
            ratio,
        )

    def _dobi(self, walking: dict[str, Any], done: Callable[[int, int, float | None], None]) -> None:
        if walking["targets"] is not None or walking["limit"] is not None:
            raise InputError("dobi learns the ranks of all Linears together: leave targets and limit out")
        learned = learn_ranks(
            self.model, [_ids(b) for b in self.batches], self.ratio, seed=self.report.seed, **self.options
        )
        self.report.settings["losses"] = learned.losses
        them = blocks(self.model)
        for (number, name), factors in learned.factors.items():
            linear = them[number].get_submodule(name)
            m, n = weight_of(linear).shape
            row = {
                "block": number,
                "name": name,
                "out": m,
                "in": n,
                "rank": None if factors is None else factors.A.shape[1],
            }
            self.report.layers.append(row)
            if factors is not None:
                replace(them[number], name, LowRankLinear.from_factors(*factors, bias_of(linear)))
        for number in range(len(them)):
            done(number, len(them), None)

    def _moments(self, site: Site) -> Whitened:
        """Factorised once for the Linears that share them."""
        if self.shared is None or self.shared[0] is not site.stats:
            options = {k: v for k, v in self.options.items() if k in ("ridge", "ridge_target")}
            name = self.options.get("whitener", "cholesky")
            self.shared = (site.stats, Whitened.of(site.stats.H, site.stats.Delta, whitener_name=name, **options))
        return self.shared[1]

    def _made(
        self,
        number: int,
        name: str,
        linear: nn.Module,
        factors: Callable[[Tensor, int], tuple[Factors, dict[str, Any]]],
        site: Site | None = None,
        ratio: float | None = None,
    ) -> nn.Module | None:
        begin = time.perf_counter()
        W = weight_of(linear).detach()
        m, n = W.shape
        rank = rank_for(self.ratio if ratio is None else ratio, m, n)
        row: dict[str, Any] = {"block": number, "name": name, "out": m, "in": n, "rank": rank}
        self.report.layers.append(row)
        if rank * (m + n) >= m * n:
            row["rank"] = None
            return None
        if site is not None and site.stats.n < n and n not in self.warned:
            self.warned.add(n)
            log.warning(
                "%d calibration tokens are fewer than the %d inputs of %s: directions that were not seen are left to the "
                "ridge; give twice as many tokens as inputs",
                site.stats.n,
                n,
                name,
            )
        found, about = factors(W, rank)
        row |= about
        if site is not None:
            row["top_share"] = _top_share(site.stats.H)
        row["seconds"] = time.perf_counter() - begin
        return LowRankLinear.from_factors(*found, bias_of(linear))


def _top_share(H: Tensor) -> float:
    """Share of the largest eigenvalue in the trace: near one where a single token makes up the moments."""
    vector = torch.ones(len(H), dtype=H.dtype, device=H.device)
    for _ in range(20):
        vector = H @ vector
        vector = vector / vector.norm().clamp_min(torch.finfo(H.dtype).tiny)
    trace = float(H.trace())
    return float(vector @ H @ vector) / trace if trace > 0 else 0.0


def _check_model(model: nn.Module) -> None:
    if any(isinstance(module, LowRankLinear) for module in model.modules()):
        raise InputError("the model is compressed already: compress the one that it was made from")
    quantised = getattr(model, "is_quantized", False) or any(
        not p.is_floating_point() for p in blocks(model).parameters()
    )
    if quantised:
        raise TypeError("the weights are quantised, which cannot be factorised: load the model in float32 or bfloat16")


def _rows(
    calibration: Any, tokenizer: Tokenizer | None, count: int, length: int, seed: int
) -> Int[Tensor, "rows tokens"] | Sequence[Batch]:
    if calibration is None or (not isinstance(calibration, Tensor) and not len(calibration)):
        raise InputError("there is no calibration: give token ids, batches, or texts with a tokenizer")
    if isinstance(calibration, Tensor):
        if calibration.ndim != 2 or calibration.is_floating_point():
            raise InputError(
                f"calibration of the shape {tuple(calibration.shape)} and {calibration.dtype} is no (rows, tokens) of ids"
            )
        return calibration
    if isinstance(calibration[0], str):
        if tokenizer is None:
            raise InputError("texts need a tokenizer: give tokenizer=, or token ids")
        return windows(calibration, tokenizer, count, length, seed=seed)
    return calibration


def _batched(rows: Any, batch_size: int) -> list[Batch]:
    if batch_size < 1:
        raise InputError(f"a batch of {batch_size} is none: give at least 1")
    return list(rows.split(batch_size)) if isinstance(rows, Tensor) else list(rows)


def _ids(batch: Batch) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch["input_ids"]


def _tokens(batches: Sequence[Batch]) -> int:
    return sum(
        int(b["attention_mask"].sum()) if not isinstance(b, Tensor) and "attention_mask" in b else _ids(b).numel()
        for b in batches
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
