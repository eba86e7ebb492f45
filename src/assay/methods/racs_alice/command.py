"""`assay run racs-alice`: train a language model on a text, and weigh the optimizer against AdamW on the same steps."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay._errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["train"]

CHECKPOINT_EVERY = 100
POINTS = 20  # of the curve


def train(
    *,
    text: Path,
    out: Path,
    config: str | None = None,
    model: str | None = None,
    method: Literal["alice", "racs", "alice-zero", "eigen-adam"] = "alice",
    lr: float | None = None,
    adam_lr: float = 1e-3,
    steps: int = 300,
    batch: int = 32,
    length: int = 128,
    accumulate: int = 1,
    rank: int | None = None,
    against: Literal["adamw", "none"] = "adamw",
    bf16: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    seed: int = 0,
) -> None:
    """Train a language model on a text with RACS or Alice, and AdamW beside it.

    Both see the same data in the same steps. The folder gets the trained model (transformers files: config.json, model.safetensors, tokenizer), curve.csv and
    curve.png (loss on held-out text against AdamW's), update_rms.csv (how far a step moves each weight) and report.json
    (losses, state bytes, step times). A checkpoint is kept every 100 steps: after Ctrl-C the same command goes on from it.

    Parameters
    ----------
    text : PATH
        A text file, a folder of .txt files, a JSONL file whose lines have a "text", or a corpus that Assay knows
        (shakespeare, english). Split into training, validation and test text by document.
    out : PATH
        The folder for the results.
    config : FILE|SIZE
        A transformers config.json to train from scratch, or 60m, 130m, 350m, 1.3b (the paper's LLaMAs). The tokenizer is
        the one that lies beside the file, else bytes. Without config and model: a LLaMA of 0.2 million parameters.
    model : DIR
        Continue this model instead, with its own tokenizer: a transformers folder, a GGUF file, or an asset.
    method
        The optimizer of the matrices; everything else is Adam's.
    lr
        Of the matrices; by default the method's (0.02; Eigen-Adam 0.001), and then neither side was tuned.
    adam_lr
        Of everything else, and of AdamW.
    steps
        Optimizer steps; the rate rises over the first tenth of them and falls by a cosine.
    batch
        Windows in a batch.
    length
        Tokens in a window.
    accumulate
        Batches whose gradients are averaged for one step.
    rank
        Of Alice's basis; by default a quarter of the smallest matrix side.
    against
        The rival, or none.
    bf16
        Compute losses under bfloat16 autocast.
    device
        auto takes CUDA where there is one.
    seed
        Of fresh weights, batches and Alice's draws.

    Examples
    --------
    assay run racs-alice --text shakespeare --method racs --lr 0.04 --adam-lr 0.008 --out out
    assay run racs-alice --text notes/ --model ./my-llama --lr 0.002 --adam-lr 1e-4 --out out
    """
    for name, value in (("steps", steps), ("batch", batch), ("length", length), ("accumulate", accumulate)):
        if value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}")
    if seed < 0:
        raise InputError(f"--seed must be at least 0, got {seed}")
    if rank is not None and rank < 1:
        raise InputError(
            f"--rank must be at least 1, got {rank}: leave it out for a quarter of the smallest matrix side"
        )
    for name, rate in (("lr", lr), ("adam-lr", adam_lr)):
        if rate is not None and not 0 <= rate < math.inf:
            raise InputError(f"--{name} must be finite and at least 0, got {rate}")
    if config is not None and model is not None:
        raise InputError("--config trains from scratch and --model continues: give one of them")
    # What changes the trajectory: a folder that was begun otherwise is not gone on with.
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in locals().items() if k in _SETTINGS}
    out.mkdir(parents=True, exist_ok=True)
    _begin(out, settings)

    from . import build_param_groups
    from ._training import spaced_windows, window_losses

    fresh, tokenizer = _opened(config, model)
    tokens = _tokens(text, tokenizer, out)
    place = _device(device)
    sides = [method, *(["adamw"] if against == "adamw" else [])]
    results: dict[str, dict[str, Any]] = {}
    for side in sides:
        trained = fresh(seed).to(place)
        _fits(trained, spaced_windows(tokens["train"], 2, length), length)
        groups = build_param_groups(trained, method, lr=lr, adam_lr=adam_lr)
        optimizer, said = _optimizer(side, groups, adam_lr, rank, steps, seed)
        print(f"{side}: {said}, {steps} steps of {batch * accumulate * length:,} tokens")
        progress = _run(trained, optimizer, tokens, out, side, settings)
        test = spaced_windows(tokens["test"], 256, length)
        results[side] = {
            **progress,
            "settings": said,
            "test_nll": float(window_losses(trained, test, 4 * batch).mean()),
            "state_bytes": _state_bytes(optimizer),
            "weight_bytes": sum(p.numel() * p.element_size() for p in trained.parameters()),
        }
        if side == method:
            _save_model(trained, tokenizer, out)
    _report(out, method, results, tuned=lr is not None)
    for path in [*out.glob("checkpoint-*.pt"), *out.glob("tokens-*.npy")]:
        path.unlink()


_SETTINGS = (
    "text",
    "config",
    "model",
    "method",
    "lr",
    "adam_lr",
    "steps",
    "batch",
    "length",
    "accumulate",
    "rank",
    "bf16",
    "seed",
)


def _begin(out: Path, settings: dict[str, Any]) -> None:
    """Remember what the folder was begun with; refuse to mix two runs. A run that came to no checkpoint is forgotten."""
    kept = out / "settings.json"
    if kept.exists():
        try:
            before = json.loads(kept.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{kept} is not JSON, so this is no run of this command: give a new folder") from error
        changed = [k for k in settings if before.get(k) != settings[k]]
        begun = (out / "report.json").exists() or any(out.glob("checkpoint-*.pt"))
        if not begun:
            for path in out.glob("tokens-*.npy"):
                path.unlink()  # of another text, or of this one before it was corrected
        elif changed:
            first = changed[0]
            raise InputError(
                f"{out} holds a run with --{first.replace('_', '-')} {before.get(first)}, this one has {settings[first]}: "
                "give another --out, or remove the folder"
            )
    elif any(out.iterdir()):
        raise InputError(f"{out} is not empty and holds no run of this command: give a new folder")
    with _written(kept) as path:
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _opened(config: str | None, model: str | None) -> tuple[Callable[[int], nn.Module], Any]:
    """A function that makes the model to start from, and its tokenizer; None for bytes."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from assay.lm import load
    from assay.lm._bytes import VOCABULARY, byte_llama_config

    from ._configs import SIZES, llama_config

    if model is not None:
        loaded = load(model)
        return (lambda seed: load(loaded.path).model), loaded.tokenizer
    tokenizer: Any = None
    if config is None:
        made: Any = byte_llama_config()
    elif config in SIZES:
        made = llama_config(config, VOCABULARY)  # type: ignore[arg-type]
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise InputError(
                f"--config {config} is neither a file nor one of {', '.join(SIZES)}: give a transformers config.json"
            )
        try:
            made = AutoConfig.from_pretrained(path)
        except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise InputError(f"{path} is not a configuration that transformers knows: {' '.join(said[:2])}") from error
        if type(made) not in AutoModelForCausalLM._model_mapping:
            raise InputError(
                f"{path} is of a {made.model_type}, which is no causal language model in transformers: give one"
            )
        if hasattr(made, "is_decoder") and not made.is_encoder_decoder:
            made.is_decoder = True  # BERT and its kin look ahead otherwise
        if any(
            (path.parent / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        ):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, local_files_only=True)
        else:
            made.vocab_size = VOCABULARY
            made.bos_token_id, made.eos_token_id, made.pad_token_id = None, 0, 0

    def fresh(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(made, dtype=torch.float32)

    return fresh, tokenizer


def _tokens(text: Path, tokenizer: Any, out: Path) -> dict[str, np.ndarray]:
    """Training, validation and test tokens, mapped from disk; tokenised once."""
    import numpy as np

    from assay.data import open_input, resolve, split

    parts = ("train", "validation", "test")
    paths = {part: out / f"tokens-{part}.npy" for part in parts}
    if not all(path.exists() for path in paths.values()):
        for part, documents in split(open_input(resolve(str(text), "documents"))).items():
            with _written(paths[part]) as path, path.open("wb") as file:
                np.save(file, _encoded([document.text for document in documents], tokenizer))
    return {part: np.load(paths[part], mmap_mode="r") for part in parts}


def _encoded(texts: list[str], tokenizer: Any) -> np.ndarray:
    """The tokens of texts, each ended by the tokenizer's end; None stands for bytes."""
    import numpy as np

    from assay.lm._bytes import byte_tokens

    if tokenizer is None:
        return byte_tokens(texts)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return np.concatenate([np.asarray([*ids, *end], np.int32) for ids in encoded])


def _fits(model: Any, windows: Any, length: int) -> None:
    """Refuse a model that these windows would break, or whose predictions see the token that they predict."""
    import torch

    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise InputError(
            f"--length {length} is more than the {longest} positions of the model: give --length {longest}"
        )
    rows = model.get_input_embeddings().num_embeddings
    if int(windows.max()) >= rows:
        raise InputError(
            f"the tokenizer makes token {int(windows.max())}, the model has {rows}: they do not belong together"
        )
    first = windows[:1, :-1].to(next(model.parameters()).device)
    changed = first.clone()
    changed[0, -1] = (first[0, -1] + 1) % rows
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.cat([first, changed]), use_cache=False).logits[:, :-1].float()
    model.train(training)
    if logits.numel() and not torch.allclose(logits[0], logits[1], rtol=1e-2, atol=1e-3):
        raise InputError(
            f"the predictions of a {model.config.model_type} see the tokens after them: give a causal model"
        )


def _device(name: str) -> Any:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _optimizer(
    side: str, groups: list[dict[str, Any]], adam_lr: float, rank: int | None, steps: int, seed: int
) -> tuple[Optimizer, str]:
    """The optimizer of a side, and its settings in words."""
    import torch

    from . import RACS, Alice, AliceZero, EigenAdam

    if side == "adamw":
        params = [p for group in groups for p in group["params"]]
        return torch.optim.AdamW(params, lr=adam_lr, weight_decay=0.0), f"lr {adam_lr:g} for all, no decay"
    rates = f"lr {groups[0]['lr']:g} for the matrices, {adam_lr:g} for the rest"
    if side == "racs":
        return RACS(groups), rates
    interval = min(200, max(10, steps // 6))
    if side == "eigen-adam":
        return EigenAdam(groups, interval=interval), f"{rates}, interval {interval}"
    rank = rank or max(1, min(min(p.shape) for p in groups[0]["params"]) // 4)
    leading = max(1, rank * 40 // 128)  # the paper's share
    make = Alice if side == "alice" else AliceZero
    optimizer: Optimizer = make(groups, rank=rank, leading=leading, interval=interval, seed=seed, stagger=True)
    return optimizer, f"{rates}, rank {rank}, leading {leading}, interval {interval}"


def _run(
    model: nn.Module,
    optimizer: Optimizer,
    tokens: dict[str, np.ndarray],
    out: Path,
    side: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Train a side from where its last checkpoint left it; what was measured on the way."""
    import torch
    from tqdm import tqdm

    from ._training import schedule, spaced_windows, training, window_losses

    steps, batch, length = settings["steps"], settings["batch"], settings["length"]
    checkpoint = out / f"checkpoint-{side}.pt"
    seen: dict[str, Any] = {"curve": [], "step_seconds": [], "update_rms": {}}
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, seen = saved["step"], saved["seen"]
        print(f"{side}: goes on from step {start}")
    validation = spaced_windows(tokens["validation"], 64, length)
    every = max(1, steps // POINTS)
    full = max(range(steps), key=lambda step: schedule(step, steps))  # the first step at the whole rate
    if start == 0:
        seen["curve"].append([0, float(window_losses(model, validation, 4 * batch).mean())])

    done = training(
        model,
        [optimizer],
        tokens["train"],
        steps=steps,
        batch=batch,
        length=length,
        seed=settings["seed"],
        start=start,
        accumulate=settings["accumulate"],
        bf16=settings["bf16"],
    )
    last = start
    try:
        with tqdm(total=steps, initial=start, desc=side, unit="step", disable=None) as bar:
            for _ in range(start, steps):
                before = None
                if last == full:
                    before = {name: p.detach().clone() for name, p in model.named_parameters()}
                began = time.perf_counter()
                last = next(done)
                seen["step_seconds"].append(time.perf_counter() - began)
                if before is not None:
                    seen["update_rms"] = {
                        name: float((p.detach() - before[name]).float().square().mean().sqrt())
                        for name, p in model.named_parameters()
                    }
                if last % every == 0 or last == steps:
                    seen["curve"].append([last, float(window_losses(model, validation, 4 * batch).mean())])
                    bar.set_postfix(validation=f"{seen['curve'][-1][1]:.3f}")
                if last % CHECKPOINT_EVERY == 0 or last == steps:
                    state = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": last,
                        "seen": seen,
                    }
                    with _written(checkpoint) as path:
                        torch.save(state, path)
                bar.update()
    except KeyboardInterrupt:
        kept = last - last % CHECKPOINT_EVERY
        print(f"\n{side}: stopped after step {last}; the same command goes on from step {kept}")
        raise
    return seen


def _state_bytes(optimizer: Optimizer) -> int:
    import torch

    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )


def _save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """The transformers files: written beside, then moved in one by one."""
    beside = out / ".model.part"
    shutil.rmtree(beside, ignore_errors=True)
    from assay.lm._bytes import byte_tokenizer
    from assay.lm._gguf import quiet

    with quiet():
        model.save_pretrained(beside)
        (tokenizer or byte_tokenizer()).save_pretrained(beside)
    for path in beside.iterdir():
        os.replace(path, out / path.name)
    beside.rmdir()


def _report(out: Path, method: str, results: dict[str, dict[str, Any]], *, tuned: bool) -> None:
    """The files of the report, and its sentences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = list(results)
    with _written(out / "curve.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *sides])
        for points in zip(*(results[side]["curve"] for side in sides), strict=True):
            writer.writerow([points[0][0], *(f"{nll:.6f}" for _, nll in points)])
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for side in sides:
        axes.plot(*zip(*results[side]["curve"], strict=True), label=side)
    axes.set(xlabel="step", ylabel="validation loss (nats a token)")
    axes.legend()
    with _written(out / "curve.png") as path:
        figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)
    with _written(out / "update_rms.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["parameter", *sides])
        for name in results[method]["update_rms"]:
            writer.writerow([name, *(f"{results[side]['update_rms'].get(name, 0.0):.6g}" for side in sides)])

    report = {
        side: {
            "settings": result["settings"],
            "test_nll": result["test_nll"],
            "validation_nll": result["curve"][-1][1],
            "state_bytes": result["state_bytes"],
            "weight_bytes": result["weight_bytes"],
            "step_seconds_median": statistics.median(result["step_seconds"]),
        }
        for side, result in results.items()
    }
    with _written(out / "report.json") as path:
        path.write_text(json.dumps({"tuned": tuned, "sides": report}, indent=2), encoding="utf-8")
    for side, each in report.items():
        rms = list(results[side]["update_rms"].values())
        moved = f", update RMS {min(rms):.2g} to {max(rms):.2g} (median {statistics.median(rms):.2g})" if rms else ""
        print(
            f"{side}: test loss {each['test_nll']:.4f} nats a token, states {each['state_bytes']:,} bytes, "
            f"{1e3 * each['step_seconds_median']:.0f} ms a step{moved}"
        )
    if not tuned:
        print(
            "Neither side was tuned: both ran with their default learning rates. Try --lr and --adam-lr on a few values each."
        )
    print(f"The model, curve.csv, curve.png, update_rms.csv and report.json are in {out}.")


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A path to write to, which takes its final name when all is written."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
