"""`assay run tracerl`: train a masked-diffusion policy on your prompts and a reward."""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay._errors import InputError

if TYPE_CHECKING:
    from . import TraceRLTrainer

__all__ = ["train"]

READY = {
    "math_verify": "math_verify_reward",
    "reasoning_gym": "reasoning_gym_reward",
    "runsum": "runsum_reward",
}


def train(
    *,
    model: str,
    prompts: str,
    reward: str,
    out: Path,
    eval_prompts: str | None = None,
    eval_share: float = 0.1,
    steps: int = 20,
    tasks: int = 24,
    responses: int = 8,
    method: Literal["trace", "random", "coupled", "one_step"] = "trace",
    value_model: bool = False,
    lr: float | None = None,
    shrink: int | None = None,
    max_new_tokens: int | None = None,
    block_length: int | None = None,
    threshold: float = 0.9,
    temperature: float = 1.0,
    eos: Literal["fill", "none"] | None = None,
    updates: int = 2,
    micro_batch: int = 16,
    eval_every: int = 4,
    save_every: int = 1,
    max_prompt_length: int | None = None,
    family: Literal["llada", "dream", "sdar", "assay"] | None = None,
    bf16: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
) -> None:
    """Train a masked-diffusion policy by reinforcement learning along its own decoding order.

    The folder gets the trained policy (model.safetensors, config.json and tokenizer: --model takes it again), curve.csv and
    curve.png (training and held-out reward, model calls), trace.png (one held-out answer, decoded before and after),
    settings.json with the whole configuration, and steps.jsonl and evaluations.jsonl with every number. After Ctrl-C or a
    kill the same command goes on from the last step that was saved, to the same weights.

    Parameters
    ----------
    model : DIR|NAME
        The folder of a LLaDA, Dream, SDAR or TraDo checkpoint with its tokenizer, one that Assay saved, or a run-sum model
        such as runsum-dlm-start.
    prompts : FILE
        A JSONL file: objects with a "prompt" (or question, problem, messages) and the columns that the reward reads. Or
        "runsum": fresh run sums at every step.
    reward
        runsum; math_verify (column "answer", against the last boxed expression); reasoning_gym (column "metadata"); or your
        own as module:function, called as TRL does: f(prompts, completions, **columns) -> list of numbers.
    out : PATH
        The folder for the results.
    eval_prompts : FILE
        Held-out prompts like --prompts.
    eval_share
        Without --eval-prompts: the share of the prompts that is held out.
    steps
        RL steps.
    tasks, responses
        Prompts a step, and responses a prompt. Few of either make the reward swing.
    method
        How training rows are masked: along the trace, or as one of the baselines.
    value_model
        Train a value model beside the policy: step-level advantages.
    lr
        Learning rate; by default 2e-4 for a run-sum model and 1e-6 for a checkpoint.
    shrink
        Decoding steps that become one training row; by default 1 for run sums and block models, else 8.
    max_new_tokens
        Masks put after each prompt; by default 40 for run sums, else 512.
    block_length
        Rollout blocks of a full-attention model; by default none for run sums, else 32. Block models have their own.
    threshold
        Of dynamic decoding, in rollouts and evaluation.
    temperature
        Of the rollouts. Evaluation is at 0.
    eos
        Whether an EOS ends an answer (fill) or the policy decides on every position (none: short canvases); by default none
        for run sums, else fill.
    updates
        Optimizer updates a step.
    micro_batch
        Training rows a forward.
    eval_every
        Evaluate every so many steps, and at the start and end.
    save_every
        Keep a checkpoint every so many steps.
    max_prompt_length
        Leave longer prompts out, in tokens.
    family
        Whose weight names the checkpoint has, where its config.json does not tell.
    bf16
        Compute under bfloat16 autocast; weights and states keep their precision.
    device
        Where the policy runs.
    seed
        Of everything that is drawn.

    Examples
    --------
    assay run tracerl --model runsum-dlm-start --prompts runsum --reward runsum --steps 4 --out out
    assay run tracerl --model ./SDAR-4B-Chat --prompts math.jsonl --reward math_verify --device cuda --bf16 --out out
    assay run tracerl --model ./my-model --prompts mine.jsonl --reward mypackage.rewards:score --out out
    """
    given = dict(locals())
    if not 0 < eval_share < 1:
        raise InputError(f"--eval-share must lie between 0 and 1, got {eval_share}")
    for name in ("steps", "tasks", "eval_every", "save_every", "updates", "micro_batch"):
        if given[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    function = reward_named(reward)
    free = ("out", "steps", "eval_every", "save_every", "device")
    _begin(out, {k: str(v) if isinstance(v, Path) else v for k, v in given.items() if k not in free})

    from assay.mdlm import DiffusionGenerationConfig
    from assay.testbeds._open import open_model

    from . import DiffusionValueModel, TraceRLConfig, TraceRLTrainer

    opened = open_model(model, device=device, family=family)
    policy, small = opened.model, opened.tokenizer is None
    blocks = policy.config.attention == "block"
    chat = getattr(opened.tokenizer, "chat_template", None) is not None
    asked = _asked(prompts, steps * tasks, seed, small, chat)
    held_out = _held_out(eval_prompts, small, chat)
    if held_out is None and prompts == "runsum":
        held_out = _runsum_listed()
    if held_out is None:
        kept = max(1, round(eval_share * len(asked)))
        asked, held_out = asked[:-kept], asked[-kept:]
    generation = DiffusionGenerationConfig(
        max_new_tokens=max_new_tokens or (40 if small else 512),
        block_length=block_length if block_length or small or blocks else 32,
        schedule="dynamic",
        threshold=threshold,
        temperature=temperature,
        eos_policy=eos or ("none" if small else "fill"),
    )
    rate = lr or (2e-4 if small else 1e-6)
    config = TraceRLConfig(
        generation=generation,
        output_dir=str(out),
        steps=steps,
        tasks_per_step=tasks,
        num_generations=responses,
        method=method,
        shrink=shrink or (1 if small else None),
        block_size=policy.config.block_size if blocks else None,
        post_num=None if generation.eos_policy == "none" else 1,
        limit_margin=None if generation.eos_policy == "none" else 5,
        learning_rate=rate,
        value_lr=rate if small else 5e-6,
        updates_per_step=updates,
        micro_batch_size=micro_batch,
        masks_per_sample={"random": 4, "coupled": 2, "one_step": 4}.get(method) if small else None,
        eval_every=eval_every,
        save_every=save_every,
        max_prompt_length=max_prompt_length,
        bf16=bf16,
        gradient_checkpointing=not small,
        use_cpu=device == "cpu",
        seed=seed,
    )
    trainer = TraceRLTrainer(
        policy,
        function,
        config,
        asked,
        eval_dataset=held_out,
        processing_class=None if small else opened.tokenizer,
        value_model=DiffusionValueModel.from_policy(policy) if value_model else None,
        callbacks=[_Teller()],
    )
    print(f"{len(trainer.train_prompts)} prompts, {len(held_out)} held out, {tasks} x {responses} responses a step")
    print(f"rollouts: {_said(vars(trainer.generation))}")
    before = _start(trainer, out)
    if trainer.restore(out, must=False):
        print(f"goes on from step {trainer.step}")
    if not trainer.evaluations:
        trainer.evaluate()
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(f"\nstopped in step {trainer.step + 1}; the same command goes on from the last checkpoint")
        raise
    if trainer.evaluations[-1]["step"] != trainer.step:
        trainer.evaluate()
    trainer.save_model(out)
    _curve(trainer, out)
    _picture(trainer, before, opened, out)
    first, last = trainer.evaluations[0], trainer.evaluations[-1]
    print(
        f"held-out reward {first['reward']:.3f} -> {last['reward']:.3f}, model calls a prompt {first['calls']:.2f} -> "
        f"{last['calls']:.2f} over {trainer.step} steps ({trainer.skipped} without a task to learn from)"
    )
    print(
        f"The policy, curve.csv, curve.png, trace.png, settings.json, steps.jsonl and evaluations.jsonl are in {out}."
    )


def reward_named(name: str) -> Callable[..., Any]:
    """A ready reward, or ``module:function`` of the user's."""
    if name in READY:
        import assay.methods.tracerl as tracerl

        return getattr(tracerl, READY[name])
    module, _, function = name.partition(":")
    if not function:
        raise InputError(f"there is no reward {name!r}: use {', '.join(READY)}, or your own as module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise InputError(
            f"the module {module} of --reward cannot be imported: run from its folder with PYTHONPATH=., or install it"
        ) from error
    except AttributeError as error:
        raise InputError(f"the module {module} has no {function}: give --reward module:function") from error
    if not callable(found):
        raise InputError(f"{name} is a {type(found).__name__}, expected a function f(prompts, completions, **columns)")
    return found


class _Teller:
    """Prints one line a step, with the time split, and one an evaluation."""

    def on_step_end(self, trainer: TraceRLTrainer, record: dict[str, Any]) -> None:
        """A step's line."""
        split = ", ".join(f"{part} {seconds:.1f}" for part, seconds in record["seconds"].items())
        what = f"{record['kept']} of {record['tasks']} tasks, {record.get('rows', 0)} rows"
        print(f"step {record['step']}: reward {record['reward']:.3f}, {what}, calls {record['calls']:.2f}; s: {split}")

    def on_evaluate(self, trainer: TraceRLTrainer, record: dict[str, Any]) -> None:
        """An evaluation's line."""
        print(f"step {record['step']}: held-out reward {record['reward']:.3f} ({_said(record['generation'])})")


def _said(config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if value not in (None, False)}
    shown = ("max_new_tokens", "block_length", "schedule", "threshold", "temperature", "eos_policy", "block_origin")
    return ", ".join(f"{key} {kept[key]}" for key in shown if key in kept)


def _begin(out: Path, settings: dict[str, Any]) -> None:
    """Remember what the folder was begun with; refuse to mix two runs."""
    kept = out / "command.json"
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        changed = [key for key in settings if before.get(key) != settings[key]]
        if changed and (out / "checkpoint").exists():
            first = changed[0]
            raise InputError(
                f"{out} holds a run with --{first.replace('_', '-')} {before.get(first)}, this one has {settings[first]}: give "
                "another --out, or remove the folder"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty and holds no run of this command: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    with _written(kept) as path:
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _asked(prompts: str, count: int, seed: int, small: bool, chat: bool) -> list[dict[str, Any]]:
    """The training examples, in the order of the file."""
    if prompts == "runsum":
        from assay.testbeds import runsum

        if not small:
            raise InputError("--prompts runsum goes with a run-sum model: give a JSONL file")
        return [{"prompt": prompt} for prompt in runsum.draw(count, "easy", (seed, 509)).prompts]
    return _read(Path(prompts), small, chat)


def _held_out(eval_prompts: str | None, small: bool, chat: bool) -> list[dict[str, Any]] | None:
    if eval_prompts is None:
        return None
    return _runsum_listed() if eval_prompts == "runsum" else _read(Path(eval_prompts), small, chat)


def _runsum_listed() -> list[dict[str, Any]]:
    from assay.testbeds import runsum

    return [{"prompt": prompt} for prompt in runsum.problems("easy", 128).prompts]


def _read(path: Path, small: bool, chat: bool) -> list[dict[str, Any]]:
    """The examples of a JSONL file: their prompt (in a chat, where the tokenizer has one), and every other column as it is."""
    from assay.mdlm._jsonl import PROMPT_KEYS, read_prompts
    from assay.testbeds import runsum

    if not path.is_file():
        raise InputError(f"there is no file {path}: give a JSONL file with one prompt a line")
    lines = read_prompts(path)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = []
    for line, record in zip(lines, records, strict=True):
        columns = {key: value for key, value in record.items() if key not in (*PROMPT_KEYS, "id")}
        if small and not isinstance(line.prompt, str):
            raise InputError(
                f"{path}, prompt {line.id}: a model of the run sums takes no chat, give its signs as one text"
            )
        prompt: Any = runsum.tokens(str(line.prompt)) if small else line.prompt
        if chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        found.append({"prompt": prompt, **columns})
    return found


def _start(trainer: TraceRLTrainer, out: Path) -> dict[str, Any]:
    """How the untrained policy decodes the first held-out prompt; kept, since a resumed run has it no more."""
    kept = out / "trace-before.json"
    if not kept.exists():
        with _written(kept) as path:
            path.write_text(json.dumps(_decoding(trainer)), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def _decoding(trainer: TraceRLTrainer) -> dict[str, Any]:
    from dataclasses import replace

    from . import collect_traces

    assert trainer.eval_prompts is not None
    config = replace(trainer.generation, temperature=0.0, seed=0)
    trace = collect_traces(trainer.policy, trainer.eval_prompts.ids[:1], 1, config)[0]
    return {"steps": trace.step_map.tolist(), "tokens": trace.response_ids.tolist()}


def _picture(trainer: TraceRLTrainer, before: dict[str, Any], opened: Any, out: Path) -> None:
    """When each token of the first held-out answer was committed, before and after."""
    import torch

    from assay.mdlm import DecodingTrace
    from assay.mdlm._trace_plot import trace_picture

    after = _decoding(trainer)

    def trace(found: dict[str, Any]) -> DecodingTrace:
        steps, tokens = torch.tensor([found["steps"]]), torch.tensor([found["tokens"]])
        return DecodingTrace(steps=steps, logp=torch.zeros(steps.shape, dtype=torch.float64), tokens=tokens)

    names = {"before": trace(before), f"after {trainer.step} steps": trace(after)}
    figure = trace_picture(
        names,
        signs=[opened.decode_one(token) for token in after["tokens"]],
        title="Step at which each token was committed",
    )
    with _written(out / "trace.png") as path:
        figure.savefig(path, dpi=150, format="png")


def _curve(trainer: TraceRLTrainer, out: Path) -> None:
    """Reward and model calls by step, as a table and a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, held = trainer.history, {record["step"]: record for record in trainer.evaluations}
    with _written(out / "curve.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "reward", "calls", "tasks_kept", "rows", "held_out_reward", "held_out_calls"])
        for step in range(trainer.step + 1):
            record: dict[str, Any] = steps[step - 1] if step else {}
            there = held.get(step, {})
            of_step = [record.get(key, "") for key in ("reward", "calls", "kept", "rows")]
            writer.writerow([step, *of_step, there.get("reward", ""), there.get("calls", "")])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, key, name in ((left, "reward", "reward"), (right, "calls", "model calls a prompt")):
        axis.plot([r["step"] for r in steps], [r[key] for r in steps], alpha=0.6, label="rollouts")
        axis.plot(list(held), [r[key] for r in held.values()], marker="o", label="held out")
        axis.set(xlabel="RL step", ylabel=name)
        axis.legend()
    with _written(out / "curve.png") as path:
        figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A path to write to, which takes its final name when all is written."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
