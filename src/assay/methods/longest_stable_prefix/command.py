"""`assay run longest-stable-prefix`: answer prompts with a masked-diffusion model, one contiguous block a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay._errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from assay.mdlm import DiffusionOutput
    from assay.testbeds._open import TextModel

__all__ = ["generate"]


def generate(
    *,
    model: str,
    prompt: str | None = None,
    prompts: Path | None = None,
    out: Path | None = None,
    trace: Path | None = None,
    max_new_tokens: int = 256,
    alpha: float = 0.25,
    beta: float = 0.5,
    min_commit: int = 1,
    lookback: int = 16,
    delimiters: Literal["text", "code", "cjk", "none"] = "text",
    stability: int = 1,
    pick: Literal["longest", "strict"] = "longest",
    tau_floor: float | None = None,
    cache: Literal["settled", "immediate", "none"] = "settled",
    horizon: int | None = None,
    block_length: int | None = None,
    temperature: float = 0.0,
    eos: Literal["fill", "none", "suppress"] = "fill",
    family: Literal["llada", "dream", "sdar", "assay"] | None = None,
    raw: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
) -> None:
    """Answer one prompt, or a JSONL file of prompts, and tell how many calls it took and what each committed.

    Each answer is one JSON line: id, text, steps, forwards, token_forwards, seconds, commit_lengths, active_lengths, tau,
    ends (the last token of each block), snapped_share, flip_rate, eos_filled, and the settings, which name scheduler and
    cache. Without --out the lines of --prompts are printed. A run into --out that was stopped goes on when started again;
    an answer does not depend on the others.

    Parameters
    ----------
    model : DIR|NAME
        The folder of a LLaDA, Dream, SDAR or TraDo checkpoint with its tokenizer, or runsum-dlm.
    prompt
        One prompt, answered and printed.
    prompts : FILE
        A JSONL file, one object with a "prompt" (or question, messages) and maybe an "id" a line.
    out : FILE
        The JSONL file to write to; continued if it is there and its settings are the same.
    trace : FILE
        With --prompt: a picture of when each token was committed (.png, .svg, .pdf).
    max_new_tokens
        Masks put after each prompt. More of them may change where a model stops.
    alpha, beta
        The least and the largest share of what is still masked that a step commits.
    min_commit
        At least so many tokens a step.
    lookback
        A delimiter at most so many tokens back ends the block; 0: no snapping.
    delimiters
        What a delimiter is: marks of punctuation, of code, CJK marks, or nothing.
    stability
        How many earlier predictions of a place must agree with the present one.
    pick
        Of the lengths that a threshold can leave: the longest in the range, or the shortest.
    tau_floor
        No token is committed (beyond min_commit) behind a gap between the two best logits smaller than this; 3 is a good
        first try where the default loses quality.
    cache
        Keep what was committed before the last step (settled), before this one (immediate: faster, worse), or nothing.
    horizon
        With a cache: look no further than so many tokens ahead.
    block_length
        Decode in blocks of so many tokens, the rule inside each. Block models have their own.
    temperature
        Of the sampled tokens; 0 takes the most likely.
    eos
        What an EOS does: it fills the rest (fill), it is a token like any (none), or it is never committed (suppress).
    family
        Whose weight names the checkpoint has, where its config.json does not tell.
    raw
        Do not put the prompt into the tokenizer's chat template.
    device, dtype
        Where and in what the model runs; auto: float32 on the CPU, else bfloat16.
    seed
        Of the draws, and of the training of a run-sum model.

    Examples
    --------
    assay run longest-stable-prefix --model ./LLaDA-8B-Instruct --device cuda --prompts prompts.jsonl --out answers.jsonl
    assay run longest-stable-prefix --model runsum-dlm --max-new-tokens 40 --prompt "^8+2?;=5?;-1?;????????????????????|"
    """
    if (prompt is None) == (prompts is None):
        raise InputError("give one of --prompt and --prompts: a text, or a JSONL file of them")
    if trace is not None and prompt is None:
        raise InputError("--trace is a picture of one answer: give --prompt, not --prompts")
    if trace is not None and trace.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--trace {trace} has no ending that tells its kind: use .png, .svg or .pdf")
    if horizon is not None and cache == "none":
        raise InputError("--horizon belongs to a cache: leave it out, or give --cache settled")
    from assay.mdlm import DiffusionGenerationConfig, NoCache
    from assay.mdlm._jsonl import PromptLine, read_prompts
    from assay.methods.longest_stable_prefix import LongestStablePrefix, PrefixAbsorbCache
    from assay.testbeds._open import SIGNS, open_model

    lines = [PromptLine("0", str(prompt), 0)] if prompts is None else read_prompts(prompts)
    opened = open_model(model, seed=seed, device=device, dtype=dtype, family=family)
    scheduler = LongestStablePrefix(
        alpha,
        beta,
        min_commit,
        lookback,
        None if delimiters == "none" else delimiters,
        stability,
        pick,
        tau_floor,
        tokenizer=SIGNS if opened.tokenizer is None else opened.tokenizer,
    )
    policy = NoCache() if cache == "none" else PrefixAbsorbCache(cache, horizon)
    config = DiffusionGenerationConfig(
        max_new_tokens=max_new_tokens,
        block_length=block_length,
        temperature=temperature,
        eos_policy=eos,
    )
    settings = {
        "model": model,
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "scheduler": scheduler.name,
        "policy": policy.name,
        "max_new_tokens": max_new_tokens,
        "block_length": block_length,
        "temperature": temperature,
        "eos": eos,
        "raw": raw,
        "seed": seed,
    }
    run = _Run(opened, scheduler, policy, config, raw, seed, trace)
    _answer(lines, run, settings, out, shown=prompts is None)


class _Run:
    """Answers one line at a time, so that an answer depends neither on the others nor on where a run was stopped."""

    def __init__(
        self,
        opened: TextModel,
        scheduler: Any,
        policy: Any,
        config: Any,
        raw: bool,
        seed: int,
        trace: Path | None,
    ) -> None:
        self.opened, self.scheduler, self.policy = opened, scheduler, policy
        self.config, self.raw, self.seed, self.trace = config, raw, seed, trace

    def __call__(self, line: Any) -> dict[str, Any]:
        from dataclasses import replace

        from assay.mdlm import diffusion_generate

        ids: Tensor = self.opened.encode(line.prompt, chat=not self.raw)
        config = replace(self.config, seed=self.seed + line.index, return_trace=self.trace is not None)
        output = diffusion_generate(self.opened.model, ids[None], config, self.scheduler, self.policy)
        if self.trace is not None:
            self._draw(output)
        return _record(line.id, self.opened, output)

    def _draw(self, output: DiffusionOutput) -> None:
        """The picture of one answer, as a whole file or not at all."""
        from assay.bench._files import whole_file
        from assay.mdlm import trace_picture

        assert self.trace is not None
        answer = output.sequences[0, output.canvas_start :].tolist()
        figure = trace_picture(
            {"LongestStablePrefix": output},
            signs=[self.opened.decode_one(token) for token in answer],
            title=f"{output.forwards} calls",
        )
        with whole_file(self.trace) as path:
            figure.savefig(path, format=self.trace.suffix.removeprefix("."))


def _record(name: str, opened: TextModel, output: DiffusionOutput) -> dict[str, Any]:
    stats = output.stats
    ends = [opened.decode_one(token) for token in stats["last_tokens"][0]]
    return {
        "id": name,
        "text": opened.decode(output.sequences[0, output.canvas_start :].cpu()),
        "steps": output.steps,
        "forwards": output.forwards,
        "token_forwards": output.token_forwards,
        "seconds": round(output.timings["total"], 4),
        "commit_lengths": stats["commit_lengths"][0],
        "active_lengths": stats["active_lengths"][0],
        "tau": [round(tau, 4) for tau in stats["tau"][0]],
        "ends": ends,
        "snapped_share": stats["snapped_share"],
        "flip_rate": stats["flip_rate"],
        "eos_filled": int(output.row_filled[0]),
    }


def _answer(lines: list[Any], run: _Run, settings: dict[str, Any], out: Path | None, shown: bool) -> None:
    """Answer the lines into a file or onto the screen."""
    import json
    import sys

    from assay.mdlm._jsonl import AnswerFile

    if out is None:
        for line in lines:
            record = run(line)
            print(_story(record) if shown else json.dumps({**record, "settings": settings}, ensure_ascii=False))
        return
    with AnswerFile(out, settings) as answers:
        before = len(answers.done)
        todo = list(answers.missing(lines))
        for number, line in enumerate(todo, 1):
            record = run(line)
            answers.append(record)
            if shown:
                print(_story(record))
            else:
                print(f"{number}/{len(todo)}  {_account(record)}", file=sys.stderr)
        kept = f", {before} were there" if before else ""
        print(f"written to {out}: {len(todo)} answers{kept}")


def _account(record: dict[str, Any]) -> str:
    blocks = record["commit_lengths"]
    return (
        f"{record['forwards']} calls, {record['token_forwards']} token-forwards, {record['seconds']:.2f} s, "
        f"blocks {' '.join(map(str, blocks))}"
    )


def _story(record: dict[str, Any]) -> str:
    filled = f", then {record['eos_filled']} times EOS" if record["eos_filled"] else ""
    return f"{record['text']}\n\n{_account(record)}{filled}"
