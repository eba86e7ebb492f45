"""`assay run saes-svd`: compress a language model with a text, and say what that costs and brings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from assay._errors import InputError

__all__ = ["compress"]


def compress(
    *,
    model: str,
    out: Path,
    text: Path | None = None,
    ratio: float = 0.2,
    method: Literal["saes-svd", "cealc", "svd-llm", "asvd", "fwsvd", "svd", "adasvd", "dobi"] = "saes-svd",
    beta: float | None = None,
    samples: int = 64,
    length: int = 512,
    batch_size: int = 8,
    evaluate: Path | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str | None = None,
    offload: Literal["cpu", "disk"] | None = None,
    seed: int = 0,
) -> None:
    """Compress a language model, and measure it before and after.

    The folder is a model of transformers: `import assay.lm` makes AutoModelForCausalLM open it. Beside the weights it gets
    compression.json (every layer's rank, beta, errors) and layers.csv. Printed: perplexity on text that was not used for
    the compression, parameters, bytes, seconds to read 256 tokens and to write one.

    Parameters
    ----------
    model : DIR|NAME
        A transformers folder, a GGUF file, a hub id, or smollm2-135m-instruct.
    out : PATH
        The folder for the compressed model. It must not exist yet.
    text : PATH
        Calibration text like that which the model is for; Shakespeare, if none is given. Its last tenth is kept for the
        evaluation.
    ratio
        Share of the parameters of the blocks' Linears to remove.
    method
        saes-svd, or one of its rivals.
    beta
        A fixed weight of the alignment in [0, 1), in place of the choice by layer (saes-svd, cealc).
    samples, length
        Windows of calibration text, and tokens of each: together at least twice the inputs of the widest layer.
    batch_size
        Windows at once.
    evaluate : PATH
        Another text to measure on.
    dtype
        Of the weights.
    device
        Where blocks are worked on, as cuda; the model itself stays in main memory.
    offload
        Where the hidden states of the calibration wait: cpu (beside a GPU) or disk.
    seed
        Of the choice of windows.
    """
    if out.exists():
        raise InputError(f"{out} exists: --out names a new folder for the compressed model")
    if beta is not None and method not in ("saes-svd", "cealc"):
        raise InputError(f"--beta is of saes-svd and cealc, not of {method}: leave it out")
    import copy

    from assay.data import corpus
    from assay.lm import latencies, load, perplexity, save_compressed, windows
    from assay.lm._report import size
    from assay.methods.saes_svd import compress_model

    opened, tokenizer, _ = load(model, dtype=dtype)
    documents = [d.text for d in corpus("shakespeare")] if text is None else _texts(text)
    train, held = _divided(documents)
    texts = held if evaluate is None else _texts(evaluate)
    tokens = windows(train, tokenizer, samples, length, seed=seed)
    test = _windows_of(texts, tokenizer, min(length, 256))
    print(f"{model}: {size(opened)[0] / 1e6:.1f} million parameters; {tokens.numel():,} tokens of calibration")
    original = copy.deepcopy(opened)
    options: dict[str, Any] = {} if beta is None else {"beta": beta}
    progress = _Progress()
    report = compress_model(
        opened,
        tokens,
        method=method,
        ratio=ratio,
        batch_size=batch_size,
        device=device,
        offload=offload,
        seed=seed,
        source="Shakespeare" if text is None else text.name,
        on_block=progress,
        **options,
    )
    progress.done()
    print(report)
    both = {"before": original, "after": opened}
    losses = {name: perplexity(m, list(test), length=test.shape[1]) for name, m in both.items()}
    clock = latencies(both, context=min(256, _positions(opened) - 17))
    parameters, weights = (dict(zip(both, pair, strict=True)) for pair in (report.parameters, report.bytes))
    found = {
        name: {
            "perplexity": losses[name].perplexity,
            "parameters": parameters[name],
            "megabytes": weights[name] / 1e6,
            "prefill_ms": 1000 * clock[name].prefill,
            "decode_ms": 1000 * clock[name].decode,
        }
        for name in both
    }
    rows = [
        ("perplexity (held-out text)", "perplexity", "{:.2f}"),
        ("parameters", "parameters", "{:,}"),
        ("weights, MB", "megabytes", "{:.0f}"),
        ("256 tokens read, ms", "prefill_ms", "{:.0f}"),
        ("one token written, ms", "decode_ms", "{:.1f}"),
    ]
    print(f"{'':28}{'before':>16}{'after':>16}")
    for title, key, form in rows:
        print(f"{title:28}{form.format(found['before'][key]):>16}{form.format(found['after'][key]):>16}")
    slower = [what for what in ("prefill_ms", "decode_ms") if found["after"][what] > found["before"][what]]
    if slower:
        what = " and ".join({"prefill_ms": "reading", "decode_ms": "writing"}[key] for key in slower)
        print(
            f"Smaller, but {what} is not faster here: a thin layer is two calls in place of one, which small ones do not repay."
        )
    beside = out.with_name(out.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        save_compressed(opened, beside, tokenizer, method=method, ratio=ratio, settings=report.settings)
        about = json.dumps({**report.to_json(), "measured": found}, indent=1, default=float)
        (beside / "compression.json").write_text(about + "\n", encoding="utf-8")
        report.to_frame().to_csv(beside / "layers.csv", index=False)
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"saved: {out} (import assay.lm, then AutoModelForCausalLM.from_pretrained opens it)")


def _texts(path: Path) -> list[str]:
    """A file of text, or of documents."""
    from assay.data import read_documents, read_text

    if path.suffix in (".jsonl", ".json") or path.is_dir():
        return [document.text for document in read_documents(path)]
    return [read_text(path)]


def _divided(documents: list[str]) -> tuple[list[str], list[str]]:
    """Nine tenths to calibrate, the last tenth to measure: of the documents, or of the one text."""
    if len(documents) >= 10:
        cut = len(documents) - len(documents) // 10
        return documents[:cut], documents[cut:]
    joined = "\n\n".join(documents)
    cut = len(joined) * 9 // 10
    return [joined[:cut]], [joined[cut:]]


def _windows_of(texts: list[str], tokenizer: Any, length: int) -> Any:
    """Up to 32 windows of held-out text."""
    from assay.lm import windows

    for count in (32, 16, 8, 4, 2, 1):
        try:
            return windows(texts, tokenizer, count, length, seed=None)
        except InputError as error:
            if count == 1:
                raise InputError(
                    f"the held-out text is shorter than {length} tokens: give a longer text, or --length"
                ) from error
    raise AssertionError


def _positions(model: Any) -> int:
    """Tokens that the model can read."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 2048))


class _Progress:
    """Blocks that are done, as a bar."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, number: int, count: int) -> None:
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(total=count, desc="blocks", unit="block", disable=None)
        self.bar.update()

    def done(self) -> None:
        """Close it."""
        if self.bar is not None:
            self.bar.close()
