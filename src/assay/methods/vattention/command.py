"""`assay run vattention`: continue a long text with sparse attention, and tell what was read, how far off, how fast."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay._errors import InputError
from assay.bench._files import whole_file

if TYPE_CHECKING:
    from assay.methods.vattention import LayerSparsity, VAttentionConfig

__all__ = ["decode"]


def decode(
    *,
    model: str,
    text: Path,
    out: Path,
    prompt: str | None = None,
    eps: float = 0.1,
    delta: float = 0.1,
    guarantee: Literal["denominator", "output"] = "output",
    index: Literal["simhash", "oracle", "quest", "double_sparsity"] = "simhash",
    max_new_tokens: int = 128,
    audit: bool = False,
    seed: int = 0,
) -> None:
    """Continue a long text, sparsely and densely, and compare the two.

    The text is read once (dense), then continued greedily twice from the same cache. Printed and saved: the continuations
    and where they first differ, how much of the keys each layer read, seconds a token of both, and with --audit the true
    error of every layer. The folder gets report.json, continuation.txt and density.png.

    Parameters
    ----------
    model : DIR|NAME
        A transformers folder, a GGUF file, a hub id, or smollm2-135m-instruct.
    text : PATH
        The long text to continue. Longer than the model's positions, it is cut on the left, and that is said.
    out : PATH
        The folder for the results.
    prompt
        What to add behind the text, after a blank line: a question about it.
    eps, delta
        The tolerance: a relative error above eps has probability at most delta, for every head and token.
    guarantee
        What the tolerance is about: the output of a head, or the denominator of its softmax only, which reads less and
        does not bound the output's error.
    index
        Who predicts the keys that matter. The oracle knows, and saves nothing: for comparison.
    max_new_tokens
        Longest continuation, in tokens.
    audit
        Also measure the true error of every head: one more, slower pass.
    seed
        Of the draws. The same seed gives the same continuation.
    """
    if max_new_tokens < 2:
        raise InputError(f"--max-new-tokens must be at least 2, got {max_new_tokens}")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: --out names a folder for the results")
    import torch

    from assay.data import read_text
    from assay.lm import load
    from assay.methods.vattention import (
        GrowingKVCache,
        VAttentionConfig,
        reset_report,
        sparse_decoding,
        sparsity_report,
    )
    from assay.methods.vattention._transformers import check_supported

    config = VAttentionConfig(eps=eps, delta=delta, guarantee=guarantee, index=index, seed=seed)
    whole = read_text(text) + (f"\n\n{prompt}" if prompt else "")
    lm, tokenizer, _ = load(model)
    check_supported(lm)
    ids = tokenizer(whole, return_tensors="pt").input_ids
    notes = []
    room = getattr(lm.config, "max_position_embeddings", None)
    if room is not None and ids.shape[1] > room - max_new_tokens:
        if room - max_new_tokens < 2:
            raise InputError(
                f"the model has {room} positions: --max-new-tokens must be below {room - 1}, got {max_new_tokens}"
            )
        cut = ids.shape[1] - (room - max_new_tokens)
        notes.append(
            f"the text has {ids.shape[1]:,} tokens, the model {room:,} positions: the first {cut:,} tokens were cut"
        )
        ids = ids[:, cut:]
    if ids.shape[1] < 2:
        raise InputError(f"{text} is too short to continue: give at least a few words")
    if ids.shape[1] < config.min_keys:
        notes.append(f"the text has {ids.shape[1]} tokens: below {config.min_keys} every step is dense")
    for note in notes:
        print(note)

    # Layers with a sliding window keep all keys too (their masks hide the old ones): what they forgot could not be cropped.
    special = set(getattr(lm.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    cache = GrowingKVCache(lm.config if special else None)
    stops = _stop_tokens(lm, tokenizer)

    def run() -> tuple[list[int], list[float]]:
        """Greedy tokens and their seconds; the cache is left as it was."""
        tokens, seconds, last = [], [], ids[:, -1:]
        for _ in range(max_new_tokens):
            begin = time.perf_counter()
            last = lm(last, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - begin)
            tokens.append(int(last))
            if tokens[-1] in stops:
                break
        cache.crop(-len(tokens))
        return tokens, seconds

    with torch.inference_mode():
        begin = time.perf_counter()
        lm(ids[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - begin
        dense, dense_seconds = run()
        reset_report(lm)
        with sparse_decoding(lm, config):
            sparse, sparse_seconds = run()
        read = sparsity_report(lm)
        if audit:
            reset_report(lm)
            with sparse_decoding(lm, replace(config, audit=True)):
                run()
            read = sparsity_report(lm)

    same = next(
        (i for i, (a, b) in enumerate(zip(dense, sparse, strict=False)) if a != b), min(len(dense), len(sparse))
    )
    report: dict[str, Any] = {
        "model": model,
        "text": str(text),
        "tokens": ids.shape[1],
        "eps": eps,
        "delta": delta,
        "guarantee": guarantee,
        "index": index,
        "seed": seed,
        "notes": notes,
        "density": statistics.fmean(float(layer.density.mean()) for layer in read),
        "seconds_prefill": prefill,
        "seconds_a_token": {"dense": statistics.median(dense_seconds), "sparse": statistics.median(sparse_seconds)},
        "first_difference": None if dense == sparse else same,
        "continuation": {"dense": tokenizer.decode(dense), "sparse": tokenizer.decode(sparse)},
        "layers": [_layer(layer) for layer in read],
    }
    for name, data in (
        ("continuation.txt", report["continuation"]["sparse"].encode()),
        ("density.png", _picture(read, config)),
        ("report.json", (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode()),
    ):
        with whole_file(out / name) as path:
            path.write_bytes(data)

    print(report["continuation"]["sparse"])
    print()
    for layer in read:
        error = (
            ""
            if layer.err is None
            else f", error {float(layer.err.mean()):.4f}, largest head {float(layer.err.max()):.4f}"
        )
        print(f"layer {layer.layer:3d}: read {float(layer.density.mean()):6.1%} of the keys{error}")
    ratio = report["seconds_a_token"]["dense"] / report["seconds_a_token"]["sparse"]
    print(
        f"all layers: {report['density']:.1%} of the keys; {report['seconds_a_token']['sparse']:.3f} s a token, "
        f"dense {report['seconds_a_token']['dense']:.3f} s ({ratio:.2f}x)"
    )
    if dense == sparse:
        print(f"the dense continuation is the same, all {len(dense)} tokens")
    else:
        print(f"the dense continuation first differs at token {same + 1} of {len(sparse)}")
    print(f"written to {out}: report.json, continuation.txt, density.png")


def _stop_tokens(lm: Any, tokenizer: Any) -> set[int]:
    found = [tokenizer.eos_token_id, getattr(lm.generation_config, "eos_token_id", None)]
    return {int(t) for entry in found if entry is not None for t in (entry if isinstance(entry, list) else [entry])}


def _layer(layer: LayerSparsity) -> dict[str, Any]:
    numbers = {name: getattr(layer, name) for name in ("density", "budget", "err")}
    heads = {name: None if x is None else [round(v, 6) for v in x.tolist()] for name, x in numbers.items()}
    return {"layer": layer.layer, "steps": layer.steps, "path": layer.path, "index_bytes": layer.memory_bytes, **heads}


def _picture(read: list[LayerSparsity], config: VAttentionConfig) -> bytes:
    """What share of the keys each head of each layer read, as PNG."""
    import io

    import torch
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(
        torch.stack([layer.density for layer in read]).T.numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis"
    )
    ticks = range(0, len(read), max(1, len(read) // 10))
    axes.set_xticks(list(ticks), [str(read[i].layer) for i in ticks])
    axes.set(
        xlabel="layer",
        ylabel="head",
        title=f"share of the keys read ({config.guarantee}, eps {config.eps}, delta {config.delta})",
    )
    figure.colorbar(shown)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
