"""The experiments behind the claims: reinforcement learning of a half-trained model on run sums, and fine-tuning."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay.bench import Cases, Trial, experiment, prepare
from assay.mdlm import (
    DiffusionGenerationConfig,
    MaskedDiffusionLM,
    Training,
    TrainingPlan,
    diffusion_generate,
)
from assay.testbeds import load, runsum

from . import (
    DiffusionValueModel,
    Trace,
    TraceRLConfig,
    TraceRLTrainer,
    collect_traces,
    runsum_reward,
    sft_loss,
    sft_rows,
)
from ._losses import trace_policy_loss
from ._scores import target_logps
from ._sft import SFTRows
from ._slices import SliceBatch

GROUP = 8  # responses a task
RATE = 2e-4  # where none is tuned: the quick scale, the value model's run, larger blocks
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
TUNING_SEED = 100  # not one of the study's
TUNING_PROBLEMS = 256
ROLLOUT = DiffusionGenerationConfig(
    max_new_tokens=runsum.ANSWER_LENGTH, schedule="dynamic", threshold=0.9, temperature=1.0, eos_policy="none"
)
GREEDY = replace(ROLLOUT, temperature=0.0)
ONE_A_STEP = DiffusionGenerationConfig(max_new_tokens=runsum.ANSWER_LENGTH)
#: What an arm differs in. Four rows a sample are about as many as a trace has.
ARMS: dict[str, dict[str, Any]] = {
    "trace": {"shrink": 1},
    "trace-s4": {"shrink": 4},
    "random": {"method": "random", "masks_per_sample": 4},
    "coupled": {"method": "coupled", "masks_per_sample": 2},
    "one-step": {"method": "one_step", "masks_per_sample": 4},
    "value": {"shrink": 1},
}
HALVES = 8  # half-batches whose gradients are compared


# Policies -----------------------------------------------------------------------------------------------------------


def examples(problems: runsum.Problems) -> list[dict[str, Any]]:
    """Problems as a data set of token ids."""
    return [{"prompt": prompt} for prompt in problems.prompts]


def trainer_of(
    model: MaskedDiffusionLM,
    settings: dict[str, Any],
    seed: int,
    steps: int,
    tasks: int,
    value_model: DiffusionValueModel | None = None,
    temperature: float = 1.0,
) -> TraceRLTrainer:
    """One recipe for every arm; ``settings`` is what it differs in. Every step has problems of its own.

    The temperature of the rollouts is that of the objective too.
    """
    config = TraceRLConfig(
        **{
            "generation": replace(ROLLOUT, temperature=temperature),
            "logprob_temperature": temperature,
            "steps": steps,
            "tasks_per_step": tasks,
            "num_generations": GROUP,
            "learning_rate": RATE,
            "value_lr": RATE,
            "normalize": "step",
            "post_num": None,
            "limit_margin": None,
            "updates_per_step": 2,
            "micro_batch_size": 64,
            "eval_generation": GREEDY,
            "seed": seed,
            "use_cpu": True,
            **settings,
        }
    )
    problems = runsum.draw(steps * tasks, "easy", (seed, 509))
    return TraceRLTrainer(model, runsum_reward, config, examples(problems), value_model=value_model)


def decoded(model: MaskedDiffusionLM, problems: runsum.Problems, config: DiffusionGenerationConfig) -> dict[str, Cases]:
    """Exact answers and model calls of each held-out problem."""
    out = diffusion_generate(model, problems.prompts, replace(config, seed=0))
    right = runsum.exact_match(problems.prompts, out.sequences[:, runsum.PROMPT_LENGTH :])
    return {
        "exact_match": Cases(right.double().numpy(), problems.ids),
        "calls": Cases(out.row_forwards.double().numpy(), problems.ids),
    }


def trained(trial: Trial, model: MaskedDiffusionLM, settings: dict[str, Any], config: DiffusionGenerationConfig) -> int:
    """Train in place and log the held-out share on the way. Returns how many rows were trained on."""
    trainer = trainer_of(model, settings, trial.seed, trial["steps"], trial["tasks"], temperature=trial["temperature"])
    held_out = runsum.problems("easy", trial["watched"])
    seconds = 0.0
    trial.log(0, exact_match=float(decoded(model, held_out, config)["exact_match"].values.mean()))
    for step in trial.progress(trial["steps"]):
        record = trainer.one_step()
        seconds += sum(record["seconds"].values())
        if (step + 1) % trial["every"] == 0:
            trial.log(step + 1, exact_match=float(decoded(model, held_out, config)["exact_match"].values.mean()))
    (trial.folder / "steps.json").write_text(json.dumps(trainer.history, indent=1), encoding="utf-8")
    return sum(record.get("rows", 0) for record in trainer.history)


@prepare(per=("arm", "model", "steps", "tasks", "temperature"), settings={"rate": RATES}, minutes=10)
def rate_run(job: Trial) -> dict[str, float]:
    """Exact match after training at one rate, on problems of the tuning seed alone; not at the quick scale."""
    if job.scale == "quick" or job.arm not in ARMS or job.arm == "value":
        return {}
    model = load(job["model"])
    settings = {**ARMS[job.arm], "learning_rate": job["rate"]}
    trainer = trainer_of(model, settings, TUNING_SEED, job["steps"], job["tasks"], temperature=job["temperature"])
    for _ in job.progress(job["steps"]):
        trainer.one_step()
    problems = runsum.draw(TUNING_PROBLEMS, "easy", (TUNING_SEED, 511))
    return {"exact_match": float(decoded(model, problems, GREEDY)["exact_match"].values.mean())}


def rate_of(trial: Trial) -> float:
    """The arm's rate of the grid that did best on the tuning seed; the lowest of equals."""
    found = {rate: trial.prepared(rate_run, rate=rate).result.get("exact_match") for rate in RATES}
    measured = {rate: share for rate, share in found.items() if share is not None}
    return max(measured, key=lambda rate: measured[rate]) if measured else RATE


@experiment(
    arms=("start", "trace", "random", "coupled", "trace-s4"),
    measures=("exact_match", "calls", "rows", "train_seconds"),
    curves=("exact_match",),
    settings={
        "model": "runsum-dlm-start",
        "steps": 12,
        "tasks": 24,
        "problems": 512,
        "watched": 256,
        "every": 4,
        "temperature": 1.0,
    },
    needs=(rate_run,),
    seeds=5,
    minutes=10,
    quick={"arms": ("start", "trace", "random"), "seeds": 3, "steps": 3, "tasks": 12, "problems": 128, "watched": 32},
)
def policies(trial: Trial) -> dict[str, Any]:
    """Held-out exact match and model calls (dynamic .9, temperature 0) after RL, and the rows that it took.

    All seeds and arms start from the same half-trained policy, each arm at the best rate of one grid; a seed draws its
    problems and its samples.
    """
    model = load(trial["model"])
    rows, start = 0, time.perf_counter()
    if trial.arm != "start":
        rows = trained(trial, model, {**ARMS[trial.arm], "learning_rate": rate_of(trial)}, GREEDY)
    seconds = time.perf_counter() - start
    held_out = runsum.problems("easy", trial["problems"])
    return {**decoded(model, held_out, GREEDY), "rows": float(rows), "train_seconds": seconds}


# The value model ----------------------------------------------------------------------------------------------------


@prepare(per=("seed", "model", "steps", "tasks", "every", "temperature"), minutes=20)
def value_run(job: Trial) -> dict[str, Any]:
    """One run with a value model; policy and value model are kept on the way."""
    model = load(job["model"])
    value = DiffusionValueModel.from_policy(model)
    trainer = trainer_of(model, ARMS["value"], job.seed, job["steps"], job["tasks"], value, job["temperature"])
    for step in job.progress(job["steps"]):
        trainer.one_step()
        if (step + 1) % job["every"] == 0:
            for name, kept in (("policy", model), ("value", value)):
                state = {key: weight.detach().contiguous() for key, weight in kept.state_dict().items()}
                save_file(state, job.folder / f"{name}-{step + 1}.safetensors")
    return {"rewards": [record["reward"] for record in trainer.history]}


@experiment(
    arms=("start", "one-step", "value"),
    measures=("exact_match", "calls", "rows", "reward_step_variance"),
    curves=("exact_match",),
    settings={
        "model": "runsum-dlm-start",
        "steps": 12,
        "tasks": 24,
        "problems": 512,
        "watched": 256,
        "every": 4,
        "temperature": 1.0,
    },
    needs=(value_run, rate_run),
    seeds=3,
    minutes=10,
    quick=False,
)
def variants(trial: Trial) -> dict[str, Any]:
    """Held-out exact match of TraceRL with a value model, and of one-step log-probabilities; the reward's variance on the way."""
    model = load(trial["model"])
    held_out = runsum.problems("easy", trial["problems"])
    rows, rewards = 0, [0.0, 0.0]
    if trial.arm == "value":
        run = trial.prepared(value_run)
        model.load_state_dict(load_file(run / f"policy-{trial['steps']}.safetensors"))
        rewards = run.result["rewards"]
    elif trial.arm == "one-step":
        rows = trained(trial, model, {**ARMS["one-step"], "learning_rate": rate_of(trial)}, GREEDY)
        rewards = [record["reward"] for record in json.loads((trial.folder / "steps.json").read_text(encoding="utf-8"))]
    changes = torch.tensor(rewards, dtype=torch.float64).diff()
    variance = float(changes.var(correction=1) / 2) if len(changes) > 1 else 0.0
    return {**decoded(model, held_out, GREEDY), "rows": float(rows), "reward_step_variance": variance}


@experiment(
    arms=("zscore", "value"),
    measures=("noise", "noise_early", "noise_late"),
    settings={"model": "runsum-dlm-start", "steps": 12, "tasks": 24, "every": 4, "temperature": 1.0},
    needs=(value_run,),
    together=("arm",),
    seeds=3,
    minutes=20,
    quick=False,
)
def gradient_noise(trial: Trial) -> dict[Any, dict[str, float]]:
    """Relative variance of the policy gradient over half-batches: z-scored rewards against step-level advantages.

    Weights of the run with the value model after 4, 8 and 12 steps; the same rollouts for both. Trace of the covariance over
    the squared norm of the mean, so that the scale of the advantages drops out; geometric mean over the three.
    """
    run = trial.prepared(value_run)
    noise: dict[str, list[float]] = {"zscore": [], "value": []}
    for at in range(trial["every"], trial["steps"] + 1, trial["every"]):
        model = load(trial["model"])
        value = DiffusionValueModel.from_policy(model)
        model.load_state_dict(load_file(run / f"policy-{at}.safetensors"))
        value.load_state_dict(load_file(run / f"value-{at}.safetensors"))
        seed, tasks = 1000 + 100 * trial.seed + at, max(1, trial["tasks"] // 2)
        trainer = trainer_of(model, ARMS["value"], seed, HALVES, tasks, value, trial["temperature"])
        gradients: dict[str, list[Tensor]] = {"zscore": [], "value": []}
        for half in trial.progress(HALVES):
            trainer.step = half  # problems and draws of its own; no update is made
            experience = trainer.judge(*trainer.rollout())
            if not len(experience.trained):
                continue
            rows = trainer.training_rows(experience)
            zscores = experience.zscores[experience.trained][rows.batch.row_of_response]
            by_group = zscores.to(rows.advantages)[:, None] * rows.batch.p_mask
            found = policy_gradients(model, rows.batch, (by_group, rows.advantages))
            for name, gradient in zip(gradients, found, strict=True):
                gradients[name].append(gradient)
        for name, collected in gradients.items():
            noise[name].append(relative_variance(torch.stack(collected)))
    found_noise: dict[Any, dict[str, float]] = {}
    for cell in trial.cells():
        each = noise[cell.arm]
        found_noise[cell] = {
            "noise": math.exp(sum(math.log(x) for x in each) / len(each)),
            "noise_early": each[0],
            "noise_late": each[-1],
        }
    return found_noise


def policy_gradients(model: MaskedDiffusionLM, batch: SliceBatch, advantages: Sequence[Tensor]) -> list[Tensor]:
    """The objective's gradient at the first update, flat, for each set of advantages (R, L1): one forward serves all."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    sums = [torch.zeros(sum(weight.numel() for weight in weights)) for _ in advantages]
    for rows in torch.arange(len(batch)).split(64):
        part = batch.select(rows)
        logps = part.dense(target_logps(model, part, banned=(model.mask_token_id,)))
        for number, each in enumerate(advantages):
            loss, _ = trace_policy_loss(logps, logps.detach(), each[rows], part.p_mask, beta=0.0, normalize="step")
            last = number == len(advantages) - 1
            grads = torch.autograd.grad(
                loss * len(rows) / len(batch), weights, retain_graph=not last, allow_unused=True
            )
            sums[number] += torch.cat(
                [torch.zeros(w.numel()) if g is None else g.flatten() for g, w in zip(grads, weights, strict=True)]
            )
    return sums


def relative_variance(gradients: Tensor) -> float:
    """Trace of the covariance of (n, P) gradients over the squared norm of their mean."""
    gradients = gradients.double()
    return float(gradients.var(0, correction=1).sum() / gradients.mean(0).square().sum())


# Fine-tuning --------------------------------------------------------------------------------------------------------


@prepare(per=("seed",), settings={"teacher": "runsum-dlm", "taught": 1600}, minutes=10)
def taught(job: Trial) -> dict[str, Any]:
    """Right answers of the main model to fresh problems, and the order in which it decoded them (dynamic .9)."""
    teacher = load(job["teacher"])
    problems = runsum.draw(job["taught"], "easy", (job.seed, 613))
    traces = collect_traces(teacher, list(problems.prompts), 1, replace(GREEDY, seed=job.seed))
    answers = torch.stack([trace.response_ids for trace in traces])
    right = runsum.exact_match(problems.prompts, answers)
    steps = torch.stack([trace.step_map for trace in traces])
    kept = {"prompts": problems.prompts[right], "answers": answers[right], "steps": steps[right]}
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, job.folder / "traces.safetensors")
    return {"right": int(right.sum()), "rows": int(steps[right].amax(1).sum())}


@experiment(
    arms=("trace", "random", "semi-ar"),
    measures=("exact_match", "exact_match_dynamic", "calls_dynamic"),
    curves=("loss",),
    settings={"model": "runsum-ar", "steps": 200, "batch": 16, "rate": 2e-3, "problems": 128},
    needs=(taught,),
    seeds=3,
    minutes=10,
    quick=False,
)
def fine_tuning(trial: Trial) -> dict[str, Any]:
    """Exact match one token a step after 200 steps of 16 rows from the causal stage's weights, by the masks of the rows."""
    model = MaskedDiffusionLM.from_autoregressive(load(trial["model"]), runsum.MASK)
    kept = load_file(trial.prepared(taught) / "traces.safetensors")
    traces = [
        Trace(prompt_ids=p, response_ids=a, step_map=s)
        for p, a, s in zip(kept["prompts"], kept["answers"], kept["steps"], strict=True)
    ]
    plan = TrainingPlan(trial["steps"], trial["rate"], warmup=max(1, trial["steps"] // 10))
    training = Training(model, plan)
    training.advance(sft_losses(model, traces, trial), label=trial.arm)
    training.use_average()
    held_out = runsum.problems("easy", trial["problems"])
    dynamic = decoded(model, held_out, GREEDY)
    return {
        "exact_match": decoded(model, held_out, ONE_A_STEP)["exact_match"],
        "exact_match_dynamic": dynamic["exact_match"],
        "calls_dynamic": dynamic["calls"],
    }


def sft_losses(model: MaskedDiffusionLM, traces: Sequence[Trace], trial: Trial) -> Callable[[int], Tensor]:
    """The loss of a step: as many rows for every objective, drawn by seed and step alone."""
    objective: Any = trial.arm.replace("-", "_")
    ids: dict[str, Any] = {"mask_token_id": runsum.MASK, "pad_token_id": runsum.EOS}
    pool = sft_rows(traces, "trace", **ids) if objective == "trace" else None

    def loss_at(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10_000 * (trial.seed + 1) + step)
        if pool is None:
            drawn = torch.randint(len(traces), (trial["batch"],), generator=generator)
            rows = sft_rows([traces[i] for i in drawn], objective, generator=generator, **ids)
        else:
            chosen = torch.randint(len(pool.batch), (trial["batch"],), generator=generator)
            rows = SFTRows(pool.batch.select(chosen), pool.weights[chosen])
        loss = sft_loss(model, rows)
        if step % 20 == 0:
            trial.log(step, loss=float(loss.detach()))
        return loss

    return loss_at


# Larger blocks ------------------------------------------------------------------------------------------------------


@experiment(
    arms=("block4", "block8", "block8-trained"),
    measures=("exact_match", "calls", "rows"),
    curves=("exact_match",),
    settings={
        "model": "runsum-dlm-block4",
        "steps": 12,
        "tasks": 24,
        "problems": 512,
        "watched": 256,
        "every": 4,
        "temperature": 1.0,
    },
    seeds=3,
    minutes=30,
    quick=False,
)
def block_growth(trial: Trial) -> dict[str, Any]:
    """Exact match of a model trained with blocks of 4: decoded so, with blocks of 8, and with blocks of 8 after TraceRL."""
    model = load(trial["model"])
    size = 4 if trial.arm == "block4" else 8
    model.config.block_size = size
    decoding = replace(GREEDY, block_origin="prompt")
    rows = 0
    if trial.arm == "block8-trained":
        settings = {**ARMS["trace"], "block_size": size}  # the trainer counts blocks from the prompt's end
        rows = trained(trial, model, settings, decoding)
    held_out = runsum.problems("easy", trial["problems"])
    return {**decoded(model, held_out, decoding), "rows": float(rows)}
