"""`assay run freecache-guided-diffusion`: answer prompts with a masked-diffusion model, with FreeCache and a guider."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay._errors import InputError

if TYPE_CHECKING:
    from assay.mdlm import DiffusionOutput
    from assay.mdlm._jsonl import PromptLine
    from assay.methods.freecache_guided_diffusion import ARGuider, TokenAligner
    from assay.testbeds._open import TextModel

__all__ = ["generate"]


def generate(
    *,
    model: str,
    prompt: str | None = None,
    prompts: Path | None = None,
    out: Path | None = None,
    trace: Path | None = None,
    guider: str | None = None,
    max_new_tokens: int = 256,
    policy: Literal["freecache", "none", "auto"] = "freecache",
    block_length: int = 32,
    steps: int | None = None,
    window_left: int = 256,
    window_right: int = 256,
    freeze: Literal["settled", "immediate"] = "settled",
    match: Literal["exact", "topk_relative", "topk", "threshold", "stochastic"] = "exact",
    verify_chunk: int = 32,
    temperature: float = 0.0,
    eos: Literal["fill", "none", "suppress"] = "fill",
    batch: int = 1,
    drift_probe: int = 0,
    family: Literal["llada", "dream", "sdar", "assay"] | None = None,
    raw: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
) -> None:
    """Answer one prompt, or a JSONL file of prompts, and tell what it took.

    Without a guider a block of the answer is filled at a time, one token a step unless --steps says fewer. With one, each
    step keeps as many of the drafts as the guider agrees with. Each answer is one JSON line: id, text, steps, forwards,
    token_forwards, kv_columns, accepted, ar_forwards, time_dlm, time_ar, time_other (seconds; of the whole batch), and the
    settings. Without --out the lines of --prompts are printed. A run into --out that was stopped goes on when started
    again.

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
        With --prompt: a picture (.png, .svg or .pdf) of the step at which each position was committed.
    guider : DIR|NAME
        The folder of a small causal language model with its tokenizer (for Dream one of Qwen2.5), or runsum-guider.
        Vocabularies that differ are bridged over the text.
    max_new_tokens
        Masks put after each prompt. More of them may change where a model stops.
    policy
        freecache keeps what is finished, none recomputes everything, auto takes none on short canvases.
    block_length
        Tokens of a block, without a guider; must divide --max-new-tokens.
    steps
        Steps of the whole answer, without a guider; by default one a token.
    window_left, window_right
        With a guider: how far the recomputed window reaches around the last committed token.
    freeze
        When a finished block is kept: after its tokens were read (settled), or at once, as released (immediate).
    match
        When the guider agrees with a draft. topk_relative is the paper's relaxed rule.
    verify_chunk
        Drafts that the guider reads at a time.
    temperature
        Of the drafts; 0 takes the most likely.
    eos
        What an EOS does: it fills the rest (fill), it is a token like any (none), or it is never committed (suppress).
    batch
        Prompts decoded together. Changes the time, not the answers, at temperature 0.
    drift_probe
        Every so many steps compare what is kept with a full recompute; adds "drift" to the lines.
    family
        Whose weight names the checkpoint has, where its config.json does not tell.
    raw
        Do not put the prompt into the tokenizer's chat template.
    device, dtype
        Where and in what the models run; auto: float32 on the CPU, else bfloat16.
    seed
        Of the draws, and of the training of a run-sum model.

    Examples
    --------
    assay run freecache-guided-diffusion --model ./Dream-v0-Instruct-7B --guider ./Qwen2.5-1.5B-Instruct --device cuda --prompts prompts.jsonl --out answers.jsonl
    assay run freecache-guided-diffusion --model ./LLaDA-8B-Instruct --device cuda --prompt "Why is the sky blue?"
    assay run freecache-guided-diffusion --model runsum-dlm --guider runsum-guider --max-new-tokens 40 --prompt "^8+2?;=5?;-1?;????????????????????|"
    """
    if (prompt is None) == (prompts is None):
        raise InputError("give one of --prompt and --prompts: a text, or a JSONL file of them")
    if trace is not None and prompt is None:
        raise InputError("--trace is a picture of one answer: give --prompt, not --prompts")
    if batch < 1:
        raise InputError(f"--batch is {batch}, expected at least 1")
    if guider is not None and steps is not None:
        raise InputError(
            "--steps has no meaning with a guider, which decides how many tokens a step commits: leave it out"
        )
    from assay.mdlm._jsonl import PromptLine, read_prompts
    from assay.methods.freecache_guided_diffusion import CROSSOVER_LENGTH, FreeCache, flash_generate
    from assay.testbeds._open import open_model

    lines = [PromptLine("0", str(prompt), 0)] if prompts is None else read_prompts(prompts)
    opened = open_model(model, seed=seed, device=device, dtype=dtype, family=family)
    judge, aligner = _guider(guider, opened, device) if guider is not None else (None, None)

    def decode(ids: list[Any], index: int) -> DiffusionOutput:
        short = policy == "auto" and max(map(len, ids)) + max_new_tokens < CROSSOVER_LENGTH
        window = (window_left, window_right)
        cached = FreeCache("block" if judge is None else "sliding", None, window, freeze, drift_probe=drift_probe)
        return flash_generate(
            opened.model,
            ids,
            judge,
            "none" if policy == "none" or short else cached,
            max_new_tokens=max_new_tokens,
            block_length=block_length if judge is None else None,
            match=match,
            verify_chunk=verify_chunk,
            aligner=aligner,
            temperature=temperature,
            eos_policy=eos,
            steps=steps,
            seed=seed + index,
            return_trace=trace is not None,
        )

    settings = {
        "model": model,
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "guider": guider,
        "policy": policy,
        **(
            {"block_length": block_length, "steps": steps, "freeze": freeze}
            if guider is None
            else {"window": [window_left, window_right], "match": match, "verify_chunk": verify_chunk}
        ),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "eos": eos,
        "batch": batch,
        "raw": raw,
        "seed": seed,
    }
    _Run(opened, decode, raw, batch, trace).answer(lines, settings, out, shown=prompts is None)


@dataclass(frozen=True)
class _Run:
    """Answers a batch of lines at a time."""

    opened: TextModel
    decode: Callable[[list[Any], int], DiffusionOutput]
    raw: bool
    batch: int
    trace: Path | None

    def answer(self, lines: list[PromptLine], settings: dict[str, Any], out: Path | None, shown: bool) -> None:
        """Answer the lines into a file or onto the screen."""
        from assay.mdlm._jsonl import AnswerFile

        if out is None:
            for record in self._records(lines):
                print(_story(record) if shown else json.dumps({**record, "settings": settings}, ensure_ascii=False))
            return
        with AnswerFile(out, settings) as answers:
            before, todo = len(answers.done), list(answers.missing(lines))
            for number, record in enumerate(self._records(todo), 1):
                answers.append(record)
                if shown:
                    print(_story(record))
                else:
                    print(f"{number}/{len(todo)}  {_account(record)}", file=sys.stderr)
            kept = f", {before} were there" if before else ""
            print(f"written to {out}: {len(todo)} answers{kept}")

    def _records(self, lines: list[PromptLine]) -> Any:
        for begin in range(0, len(lines), self.batch):
            part = lines[begin : begin + self.batch]
            output = self.decode([self.opened.encode(line.prompt, chat=not self.raw) for line in part], part[0].index)
            if self.trace is not None:
                self._draw(output)
            for row, line in enumerate(part):
                yield self._record(line.id, output, row)

    def _record(self, name: str, output: DiffusionOutput, row: int) -> dict[str, Any]:
        stats = output.stats
        record = {
            "id": name,
            "text": self.opened.decode(output.sequences[row, output.canvas_start :].cpu()),
            "steps": int(output.row_steps[row]),
            "forwards": int(output.row_forwards[row]),
            "token_forwards": int(output.row_token_forwards[row]),
            "kv_columns": int(output.row_kv_columns[row]),
            "ar_forwards": stats["ar_forwards"],
            "accepted": stats["accepted"][row] if "accepted" in stats else None,
            **{part: round(stats[part], 4) for part in ("time_dlm", "time_ar", "time_other")},
            "scheduler": stats["scheduler"],
            "policy": stats["policy"],
        }
        return record | ({"drift": stats["drift"]} if "drift" in stats else {})

    def _draw(self, output: DiffusionOutput) -> None:
        from assay.mdlm import trace_picture

        assert self.trace is not None
        answer = output.sequences[0, output.canvas_start :].tolist()
        figure = trace_picture(
            {output.stats["scheduler"].partition("(")[0]: output},
            signs=[self.opened.decode_one(token) for token in answer],
        )
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.trace)


def _guider(name: str, opened: TextModel, device: str) -> tuple[ARGuider, TokenAligner | None]:
    """The guider, and what stands between its vocabulary and the model's."""
    from assay.methods.freecache_guided_diffusion import ARGuider, TokenAligner, swapped_ends

    if opened.tokenizer is None:
        from assay.testbeds import load

        if name not in ("runsum-guider", "runsum-ar"):
            raise InputError(f"a model of the run sums is guided by runsum-guider or runsum-ar, not by {name}")
        return ARGuider(load(name), device=device), None
    from assay.lm import load as load_lm

    dtype = str(opened.model.dtype).removeprefix("torch.")
    judge, tokenizer, _ = load_lm(name, dtype=dtype)
    ends = swapped_ends(opened.model.config.eos_token_id, tokenizer.eos_token_id)
    aligner = TokenAligner(opened.tokenizer, tokenizer, ends)
    if not aligner.identical:
        # Over the bridge only the end itself is translated.
        ours, theirs = opened.model.config.eos_token_id, tokenizer.eos_token_id
        aligner = TokenAligner(opened.tokenizer, tokenizer, {ours: theirs} if None not in (ours, theirs) else {})
        print(
            f"the vocabularies differ from id {aligner.difference} on: the guider judges the text of the drafts",
            file=sys.stderr,
        )
    return ARGuider(judge, tokenizer, device), aligner


def _account(record: dict[str, Any]) -> str:
    agreed = f", agreed {' '.join(map(str, record['accepted']))}" if record["accepted"] is not None else ""
    seconds = record["time_dlm"] + record["time_ar"] + record["time_other"]
    return (
        f"{record['steps']} steps, {record['forwards']} calls, {record['token_forwards']} token-forwards, "
        f"{seconds:.2f} s{agreed}"
    )


def _story(record: dict[str, Any]) -> str:
    return f"{record['text']}\n\n{_account(record)}\n{record['scheduler']}, {record['policy']}"
