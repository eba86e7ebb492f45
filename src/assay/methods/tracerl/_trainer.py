"""The loop: roll out, reward, make rows of the traces, update."""

import copy
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig, MaskedDiffusionLM
from assay.methods.tracerl import baselines
from assay.methods.tracerl._config import TraceRLConfig
from assay.methods.tracerl._draws import generator_for, seed_for
from assay.methods.tracerl._experience import Experience, TrainingRows, score
from assay.methods.tracerl._gae import last_step, step_gae
from assay.methods.tracerl._losses import Normalize, trace_policy_loss, value_loss
from assay.methods.tracerl._prompts import Prompts
from assay.methods.tracerl._scores import micro_batches, scored, target_logps, target_values
from assay.methods.tracerl._slices import SliceBatch, build_slices
from assay.methods.tracerl._traces import Trace, collapse_steps, collect_traces, padding_of
from assay.methods.tracerl._values import DiffusionValueModel

FEW = 32  # responses a step below which the loss is known to swing
CHECKPOINT = "checkpoint"


class Callback(Protocol):
    """What a trainer tells; every method may be left out."""

    def on_step_end(self, trainer: "TraceRLTrainer", record: dict[str, Any]) -> None:
        """Called after each RL step, with its record."""

    def on_evaluate(self, trainer: "TraceRLTrainer", record: dict[str, Any]) -> None:
        """Called after each evaluation, with its record."""


class TraceRLTrainer:
    """Trains a masked-diffusion policy on a verifiable reward, along the traces that it decodes with.

    Parameters
    ----------
    model
        The policy, a `MaskedDiffusionLM` of any family; trained in place.
    reward_funcs
        One function or several, as TRL calls them: ``f(prompts, completions, **columns) -> list``. Several are summed. An
        entry is a number, None, or (with a value model) process rewards: one number a token, or ``(segment_end, score)``
        pairs.
    args
        Settings.
    train_dataset
        Examples with ``prompt`` (text, chat messages or token ids) and the columns that the rewards read: a
        `datasets.Dataset`, or a list of dicts.
    eval_dataset
        The same, for `evaluate`.
    processing_class
        A tokenizer of transformers. None: prompts and completions are token ids.
    value_model
        A `DiffusionValueModel`: advantages by `step_gae` in place of the z-scored reward alone.
    callbacks
        Objects with some of the methods of `Callback`.
    optimizers
        The policy's optimizer and learning-rate scheduler (stepped at each update), in place of AdamW at a constant rate.
    scheduler, cache_policy
        Of the rollouts, as in `diffusion_generate`.
    rollout_fn
        ``(model, prompts, n, generation) -> list[Trace]``: another engine in place of `collect_traces`. Its step maps must
        cover the whole canvas.

    Raises
    ------
    InputError
        If the parts do not fit each other.

    Source: arXiv:2509.06949, algorithm 1.
    """

    def __init__(
        self,
        model: MaskedDiffusionLM,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        args: TraceRLConfig,
        train_dataset: Iterable[Mapping[str, Any]],
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processing_class: Any = None,
        value_model: DiffusionValueModel | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        scheduler: Any = None,
        cache_policy: Any = None,
        rollout_fn: Callable[..., list[Trace]] | None = None,
    ) -> None:
        self.args = args
        self.reward_funcs = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
        self.processing_class, self.callbacks = processing_class, list(callbacks or ())
        self.scheduler, self.cache_policy, self.rollout_fn = scheduler, cache_policy, rollout_fn
        self._check(model, value_model)
        self.blocks = model.config.attention == "block"
        self.normalize: Normalize = args.normalize or ("length" if self.blocks else "step")
        self.shrink = args.shrink or (1 if self.blocks else 8)
        self.train_prompts = Prompts(train_dataset, processing_class, model.mask_token_id, args.max_prompt_length)
        if args.tasks_per_step > len(self.train_prompts):
            self.train_prompts.at_step(0, args.tasks_per_step, args.seed)  # says so
        self.eval_prompts = None
        if eval_dataset is not None:
            self.eval_prompts = Prompts(eval_dataset, processing_class, model.mask_token_id, args.max_prompt_length)

        self.accelerator = Accelerator(cpu=args.use_cpu)
        if args.gradient_checkpointing:
            # transformers renames it in 5.24
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        self.reference = None
        if args.kl_ref == "reference" and args.beta:
            self.reference = copy.deepcopy(model).requires_grad_(False).eval().to(self.device)
        optimizer, rates = optimizers
        self.optimizer = optimizer or self._adamw(model, args.learning_rate)
        self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.rates = None if rates is None else self.accelerator.prepare(rates)
        self.value_model = self.value_optimizer = None
        if value_model is not None:
            self.value_model, self.value_optimizer = self.accelerator.prepare(
                value_model, self._adamw(value_model, args.value_lr)
            )
        self.step = 0
        self.skipped = 0
        self.history: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    # What it is made of

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.accelerator.device

    @property
    def policy(self) -> MaskedDiffusionLM:
        """The model itself, without what accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def generation(self) -> DiffusionGenerationConfig:
        """How rollouts are decoded: as configured, with a block model's blocks counted from the prompt's end."""
        given = self.args.generation
        return replace(given, block_origin="prompt", block_length=None) if self.blocks else given

    def block_size_at(self, step: int) -> int | None:
        """The block size of a step's rollouts and rows; None for full attention."""
        return self.args.warm_block_size if step < self.args.warm_steps else self.args.block_size

    def _adamw(self, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
        args = self.args
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        return torch.optim.AdamW(
            weights, lr=rate, betas=args.adam_betas, eps=args.adam_eps, weight_decay=args.weight_decay
        )

    def _check(self, model: MaskedDiffusionLM, value_model: DiffusionValueModel | None) -> None:
        args, config = self.args, model.config
        if config.attention == "block":
            if args.block_size is None:
                raise InputError(
                    f"block_size is not set, and the policy attends block by block: set it in TraceRLConfig (its config says "
                    f"{config.block_size})"
                )
            if config.logit_shift:
                raise InputError("a block model with shifted logits has no two-stream form: use one without the shift")
            if args.method == "one_step":
                raise InputError("method one_step hides the whole response, which a block model never sees: use trace")
        elif args.block_size is not None or args.warm_block_size is not None:
            raise InputError(
                "block_size is for models that attend block by block, and this one does not: leave it out, and set "
                "generation.block_length for the blocks of its rollouts"
            )
        if value_model is not None:
            if args.method != "trace":
                raise InputError(
                    f"a value model needs rows that follow a trace, where each position has one value: method is {args.method}"
                )
            if value_model.config.hidden_size != config.hidden_size:
                raise InputError(
                    f"the value model has hidden size {value_model.config.hidden_size} and the policy {config.hidden_size}: "
                    "make it with DiffusionValueModel.from_policy"
                )
        if args.responses_per_step < FEW:
            warnings.warn(
                f"{args.tasks_per_step} tasks of {args.num_generations} responses are few: below {FEW} a step the loss swings, "
                "raise either",
                stacklevel=3,
            )
        length = args.generation.block_length
        if type(self.cache_policy).__name__ == "PrefixCache" and length is not None and length < 8:
            warnings.warn(
                f"PrefixCache is made anew for each block, and blocks of {length} tokens are short: use 8 or more",
                stacklevel=3,
            )

    # The steps of a step

    def train(self, resume: bool | str = False, until: int | None = None) -> list[dict[str, Any]]:
        """Run the RL steps that are left.

        Parameters
        ----------
        resume
            Go on from the checkpoint in ``args.output_dir`` (True), if there is one, or from that of another folder.
        until
            Stop after this step; None: after ``args.steps``.

        Returns
        -------
        One record a step: rewards, what was kept, losses, seconds by part.
        """
        if resume:
            self.restore(self._folder() if resume is True else Path(resume), must=resume is not True)
        last = self.args.steps if until is None else min(until, self.args.steps)
        self._log_settings()
        while self.step < last:
            record = self.one_step()
            self._tell("on_step_end", record)
            due = self.args.eval_every and (self.step % self.args.eval_every == 0 or self.step == self.args.steps)
            if due and self.eval_prompts is not None:
                self.evaluate()
            if self.args.output_dir and (
                self.step == last or (self.args.save_every and self.step % self.args.save_every == 0)
            ):
                self.save(self._folder())
        return self.history

    def one_step(self) -> dict[str, Any]:
        """One RL step: sample, reward, update the value model, update the policy. Returns its record."""
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            prompts, traces, columns = self.rollout()
        with _timed(seconds, "reward"):
            experience = self.judge(prompts, traces, columns)
        record = self._record(experience)
        rows = None
        if self._any(len(experience.trained) > 0):
            with _timed(seconds, "scores"):
                rows = self.training_rows(experience)
        if rows is None or not self._any(not rows.idle):
            self.skipped += 1
            warnings.warn(
                f"step {self.step + 1}: no task has a mean reward within {self.args.keep_band}, nothing is trained: mix in "
                "tasks of other difficulty, or raise the rollout temperature",
                stacklevel=2,
            )
        else:
            learned = 0 if rows.idle else 1
            record |= {"rows": learned * len(rows.batch), "targets": learned * int(rows.batch.p_mask.sum())}
            if self.value_model is not None:
                with _timed(seconds, "value"):
                    record |= self._value_updates(rows)
            with _timed(seconds, "update"):
                record |= self._policy_updates(rows)
        self.step += 1
        record |= {"step": self.step, "skipped": self.skipped, "seconds": seconds}
        self.history.append(record)
        self._write("steps.jsonl", record)
        return record

    def rollout(self) -> tuple[list[Any], list[Trace], dict[str, list[Any]]]:
        """Answer this step's prompts: the prompts (one a response), the traces, and the columns (one entry a response).

        Raises
        ------
        InputError
            If another engine's traces do not fit.
        """
        args, world, rank = self.args, self.accelerator.num_processes, self.accelerator.process_index
        which = self.train_prompts.at_step(self.step, args.tasks_per_step, args.seed)[rank::world].tolist()
        if not which:
            raise InputError(
                f"{args.tasks_per_step} tasks a step are fewer than {world} processes: raise tasks_per_step"
            )
        n = args.num_generations
        generation = replace(self.generation, seed=seed_for(args.seed, self.step, "rollout", rank))
        traces = self._traces([self.train_prompts.ids[i] for i in which], n, generation)
        rows = [i for i in which for _ in range(n)]
        return [self.train_prompts.examples[i]["prompt"] for i in rows], traces, self.train_prompts.columns(rows)

    def judge(self, prompts: list[Any], traces: list[Trace], columns: Mapping[str, Sequence[Any]]) -> Experience:
        """Rewards of some responses, and which tasks are trained on.

        Parameters
        ----------
        prompts, traces, columns
            As `rollout` gives them.
        """
        rewards = score(self.reward_funcs, prompts, traces, self.policy.config.eos_token_id, columns)
        if rewards.process is not None and self.value_model is None:
            raise InputError("process rewards need a value model, which spreads them over the steps: give value_model")
        args = self.args
        cut_off_is_wrong = args.limit_margin is not None
        return Experience.of(prompts, traces, rewards, args.num_generations, args.keep_band, cut_off_is_wrong)

    def training_rows(self, experience: Experience) -> TrainingRows:
        """Rows of the responses that are trained on, with old log-probabilities, advantages and (value model) returns.

        Parameters
        ----------
        experience
            As `judge` gives it.
        """
        chosen = experience.trained.tolist()
        traces = [experience.traces[i] for i in chosen]
        batch = self._rows(traces) if traces else None
        if batch is None or not len(batch):
            rows = self._rows(experience.traces[:1], post_num=None)
            zeros = torch.zeros(rows.p_mask.shape)
            return TrainingRows(rows, zeros, zeros, zeros, zeros, zeros, idle=True)
        logp_old = self._scored(batch, self._logps_of(self.model))
        logp_ref = None if self.reference is None else self._scored(batch, self._logps_of(self.reference))
        zscores = experience.zscores[experience.trained].to(logp_old.dtype)
        if self.value_model is None:
            advantages = zscores[batch.row_of_response][:, None] * batch.p_mask
            return TrainingRows(batch, advantages, logp_old, logp_ref)

        values = self._scored(batch, self._values_of())
        raw = experience.rewards.outcome[experience.trained].to(values.dtype)
        reward = zscores if self.args.value_reward == "zscore" else raw
        count, width = len(traces), batch.response_length
        covered = batch.by_response(torch.ones_like(values), count) > 0
        steps = torch.zeros(count, width, dtype=torch.int64)
        process = torch.zeros(count, width, dtype=values.dtype)
        for row, (number, trace) in enumerate(zip(chosen, traces, strict=True)):
            size = min(width, len(trace.step_map))
            steps[row, :size] = trace.step_map[:size]
            if experience.rewards.process is not None:
                process[row, :size] = experience.rewards.process[number][:size]
        steps = collapse_steps(steps, self.shrink, self.block_size_at(self.step))
        rewards = reward[:, None] * last_step(steps, covered) + process
        returns, advantages = step_gae(
            batch.by_response(values, count), rewards, steps, covered, self.args.gamma, self.args.lam
        )
        owner, targets = batch.row_of_response, batch.p_mask
        return TrainingRows(batch, advantages[owner] * targets, logp_old, logp_ref, values, returns[owner] * targets)

    def policy_loss(
        self, rows: TrainingRows, which: Int[Tensor, " rows"]
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """The objective on some rows under the current weights, with its graph; the mean over them.

        Parameters
        ----------
        rows
            As `training_rows` gives them.
        which
            Numbers of rows: they go through one forward.
        """
        part = rows.batch.select(which)
        logp_new = part.dense(self._logps_of(self.model)(part.to(self.device)).cpu())
        return trace_policy_loss(
            logp_new,
            rows.logp_old[which],
            rows.advantages[which],
            part.p_mask,
            eps=self.args.eps,
            beta=self.args.beta,
            normalize=self.normalize,
            length=part.response_length,
            kl_normalize=self.args.kl_normalize,
            logp_ref=None if rows.logp_ref is None else rows.logp_ref[which],
        )

    def _policy_updates(self, rows: TrainingRows) -> dict[str, float]:
        def loss_of(which: Tensor) -> tuple[Tensor, dict[str, float]]:
            return self.policy_loss(rows, which)

        return self._updates(rows, loss_of, self.model, self.optimizer, self.rates, "policy")

    def _value_updates(self, rows: TrainingRows) -> dict[str, float]:
        record = {}
        if rows.values_old is not None and rows.returns is not None:
            error = (rows.values_old - rows.returns)[rows.batch.p_mask]
            record["value_error"] = float(error.square().mean()) if len(error) else 0.0
        if (self.step + 1) % self.args.train_value_every:
            return record

        def loss_of(which: Tensor) -> tuple[Tensor, dict[str, float]]:
            part = rows.batch.select(which)
            values = part.dense(self._values_of()(part.to(self.device)).cpu())
            assert rows.values_old is not None
            assert rows.returns is not None
            loss = value_loss(values, rows.values_old[which], rows.returns[which], part.p_mask, eps=self.args.eps)
            return loss, {}

        return record | self._updates(rows, loss_of, self.value_model, self.value_optimizer, None, "value")

    def _updates(
        self,
        rows: TrainingRows,
        loss_of: Callable[[Tensor], tuple[Tensor, dict[str, float]]],
        model: Any,
        optimizer: Any,
        rates: Any,
        name: str,
    ) -> dict[str, float]:
        """One epoch over the rows. An update's gradient is that of the mean over its rows on all processes."""
        world = self.accelerator.num_processes
        rank = self.accelerator.process_index
        count = 0 if rows.idle else len(rows.batch)
        order = torch.randperm(count, generator=generator_for(self.args.seed, self.step, "rows", rank))
        shares = self._shares(order)
        sums: dict[str, float] = {}
        weight = 0
        model.train()
        for share in shares:
            total = self._sum(len(share))
            if total == 0:
                continue
            optimizer.zero_grad()
            parts = (
                micro_batches(rows.batch, share, self.args.micro_batch_size)
                if len(share)
                else [torch.zeros(1, dtype=torch.int64)]
            )
            for number in range(self._most(len(parts))):
                idle = number >= len(parts) or len(share) == 0  # joins the collective backward with nothing to say
                part = parts[min(number, len(parts) - 1)]
                with self._synced_at(model, number == self._most(len(parts)) - 1):
                    loss, metrics = loss_of(part)
                    self.accelerator.backward(loss * (0.0 if idle else len(part) * world / total))
                if not idle:
                    for key, value in {"loss": float(loss.detach()), **metrics}.items():
                        sums[key] = sums.get(key, 0.0) + value * len(part)
                    weight += len(part)
            norm = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
                raise FloatingPointError(
                    f"step {self.step + 1}: the gradient of the {name} is not finite, no update was made: lower the learning "
                    "rate, or use bfloat16 or float32"
                )
            optimizer.step()
            if rates is not None:
                rates.step()
            sums["norm"] = sums.get("norm", 0.0) + float(norm or 0.0) * len(share)
        optimizer.zero_grad()
        model.eval()
        return {f"{name}_{key}": value / max(weight, 1) for key, value in sums.items()} | {
            f"{name}_updates": len(shares)
        }

    def _shares(self, order: Tensor) -> list[Tensor]:
        """The rows of each update; as many on every process."""
        if self.args.updates_per_step is not None:
            return list(order.tensor_split(self.args.updates_per_step))
        size = self.args.micro_batch_size * self.args.gradient_accumulation_steps
        shares = list(order.split(size)) if len(order) else []
        return shares + [order[:0]] * (self._most(len(shares)) - len(shares))

    # Rows and scores

    def _traces(self, prompts: list[Tensor], n: int, generation: DiffusionGenerationConfig) -> list[Trace]:
        policy = self.policy
        if self.blocks:
            policy.config.block_size = self.block_size_at(self.step)
        if self.rollout_fn is None:
            return collect_traces(
                policy,
                prompts,
                n,
                generation,
                scheduler=self.scheduler,
                cache_policy=self.cache_policy,
                decode=self._decode if self.processing_class is not None else None,
                limit_margin=self.args.limit_margin,
                batch_size=self.args.rollout_batch_size,
            )
        traces = self.rollout_fn(policy, prompts, n, generation)
        if len(traces) != len(prompts) * n:
            raise InputError(
                f"rollout_fn returned {len(traces)} traces for {len(prompts)} prompts with {n} responses each: return "
                f"{len(prompts) * n}, those of a prompt behind each other"
            )
        for number, trace in enumerate(traces):
            ids = trace.response_ids
            if (
                bool((ids == policy.mask_token_id).any())
                or not 0 <= int(ids.min()) <= int(ids.max()) < policy.config.vocab_size
            ):
                raise InputError(
                    f"trace {number} of rollout_fn holds masks or unknown tokens: return finished responses"
                )
            if not torch.equal(trace.prompt_ids, prompts[number // n]):
                raise InputError(
                    f"trace {number} of rollout_fn is of another prompt than number {number // n}: keep the order"
                )
        return traces

    def _decode(self, ids: list[int]) -> str:
        return self.processing_class.decode(ids, skip_special_tokens=True)

    def _rows(self, traces: Sequence[Trace], **changed: Any) -> SliceBatch:
        args, config = self.args, self.policy.config
        settings: dict[str, Any] = {
            "block_size": self.block_size_at(self.step),
            "mask_token_id": self.policy.mask_token_id,
            "pad_token_id": padding_of(config),
            "post_num": args.post_num,
            **changed,
        }
        if args.method == "trace":
            return build_slices(traces, shrink=self.shrink, **settings)
        settings["masks_per_sample"] = args.masks_per_sample
        settings["generator"] = generator_for(args.seed, self.step, "masks", self.accelerator.process_index)
        if args.method == "one_step":
            return baselines.one_step_rows(traces, **settings)
        make = baselines.random_rows if args.method == "random" else baselines.coupled_rows
        return make(traces, mask_rate=args.mask_rate, **settings)

    def _banned(self) -> tuple[int, ...]:
        eos = self.policy.config.eos_token_id
        suppressed = self.args.generation.eos_policy == "suppress" and eos is not None
        return (self.policy.mask_token_id, *((eos,) if suppressed else ()))

    def _logps_of(self, model: Any) -> Callable[[SliceBatch], Tensor]:
        banned = self._banned()

        def logps(batch: SliceBatch) -> Tensor:
            with self._autocast():
                return target_logps(model, batch, temperature=self.args.temperature, banned=banned)

        return logps

    def _values_of(self) -> Callable[[SliceBatch], Tensor]:
        def values(batch: SliceBatch) -> Tensor:
            with self._autocast():
                return target_values(self.value_model, batch)

        return values

    def _scored(self, batch: SliceBatch, score_of: Callable[[SliceBatch], Tensor]) -> Tensor:
        self.model.eval()
        return scored(batch, self.args.micro_batch_size, self.device, score_of)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    # Evaluation

    def evaluate(self, eval_dataset: Iterable[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Rewards of one response a prompt, decoded as ``args.eval_generation`` says.

        Parameters
        ----------
        eval_dataset
            In place of the trainer's.

        Returns
        -------
        ``reward`` (mean), ``rewards`` (one a prompt), ``calls`` (mean decoding steps a prompt), ``length`` (mean tokens of an
        answer), ``seconds``, ``step`` and the generation config.
        """
        prompts = self.eval_prompts
        if eval_dataset is not None:
            prompts = Prompts(
                eval_dataset, self.processing_class, self.policy.mask_token_id, self.args.max_prompt_length
            )
        if prompts is None:
            raise InputError("there is nothing to evaluate on: give eval_dataset")
        config = self.args.eval_generation or replace(self.args.generation, temperature=0.0)
        if self.blocks:
            config = replace(config, block_origin="prompt", block_length=None)
        config = replace(config, seed=seed_for(self.args.seed, 0, "evaluation"))
        seconds: dict[str, float] = {}
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        which = list(range(len(prompts)))[rank::world]
        rewards, calls, lengths = [0.0] * len(prompts), 0.0, 0.0
        with _timed(seconds, "evaluation"):
            if which:
                traces = self._traces([prompts.ids[i] for i in which], 1, config)
                asked = [prompts.examples[i]["prompt"] for i in which]
                eos = self.policy.config.eos_token_id
                found = score(self.reward_funcs, asked, traces, eos, prompts.columns(which))
                for i, reward in zip(which, found.outcome.tolist(), strict=True):
                    rewards[i] = reward
                calls = float(sum(int(trace.step_map.max()) for trace in traces))
                lengths = float(sum(len(trace.answer(eos)) for trace in traces))
        if world > 1:
            gathered = torch.tensor([*rewards, calls, lengths], device=self.device)
            *rewards, calls, lengths = self.accelerator.reduce(gathered, "sum").tolist()
        known = [reward for reward in rewards if reward == reward]
        record = {
            "step": self.step,
            "reward": sum(known) / max(len(known), 1),
            "rewards": rewards,
            "calls": calls / len(prompts),
            "length": lengths / len(prompts),
            "seconds": seconds,
            "generation": vars(config),
        }
        self.evaluations.append(record)
        self._write("evaluations.jsonl", record)
        self._tell("on_evaluate", record)
        return record

    # Files

    def save_model(self, folder: str | Path) -> None:
        """Write the policy (and tokenizer, and the value model in ``value_model/``) as transformers folders.

        Parameters
        ----------
        folder
            Made where it is missing.
        """
        self.accelerator.wait_for_everyone()
        parts: list[tuple[Any, Path]] = [(self.model, Path(folder))]
        if self.value_model is not None:
            parts.append((self.value_model, Path(folder) / "value_model"))
        for model, path in parts:
            state = self.accelerator.get_state_dict(model)
            if self.accelerator.is_main_process:
                self.accelerator.unwrap_model(model).save_pretrained(path, state_dict=state)
        if self.accelerator.is_main_process and hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Write a checkpoint: weights, optimizers, random states, step and records. The former one stays until it is whole.

        Parameters
        ----------
        folder
            Gets (or keeps) a ``checkpoint`` folder.
        """
        part, whole = folder / f".{CHECKPOINT}.part", folder / CHECKPOINT
        if self.accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(part))
        if self.accelerator.is_main_process:
            kept = {
                "step": self.step,
                "skipped": self.skipped,
                "history": self.history,
                "evaluations": self.evaluations,
                "settings": self._settings(),
            }
            (part / "trainer.json").write_text(json.dumps(kept), encoding="utf-8")
            old = folder / f".{CHECKPOINT}.old"
            shutil.rmtree(old, ignore_errors=True)
            if whole.exists():
                os.replace(whole, old)
            os.replace(part, whole)
            shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def restore(self, folder: Path, must: bool = True) -> bool:
        """Go on from a checkpoint that `save` wrote, exactly. Returns whether there was one.

        Parameters
        ----------
        folder
            Which holds a ``checkpoint`` folder.
        must
            Whether it is an error if it does not.

        Raises
        ------
        InputError
            If there is none, or it belongs to a run with other settings.
        """
        whole = folder / CHECKPOINT
        if not whole.exists() and (folder / f".{CHECKPOINT}.old").exists():  # killed between the two renames
            whole = folder / f".{CHECKPOINT}.old"
        if not (whole / "trainer.json").exists():
            if must:
                raise InputError(f"{folder} holds no checkpoint: give the output_dir of a run that was saved")
            return False
        kept = json.loads((whole / "trainer.json").read_text(encoding="utf-8"))
        mine = json.loads(json.dumps(self._settings()))
        for name, value in mine.items():
            if kept["settings"].get(name) != value:
                raise InputError(
                    f"the checkpoint in {folder} was made with {name} = {kept['settings'].get(name)}, this run has {value}: use "
                    "the same settings, or another output_dir"
                )
        self.accelerator.load_state(str(whole))
        self.step, self.skipped = kept["step"], kept["skipped"]
        self.history, self.evaluations = kept["history"], kept["evaluations"]
        if self.args.output_dir and self.accelerator.is_main_process:  # drop what was logged after the checkpoint
            for name, records in (("steps.jsonl", self.history), ("evaluations.jsonl", self.evaluations)):
                lines = "".join(json.dumps(record) + "\n" for record in records)
                (self._folder() / name).write_text(lines, encoding="utf-8")
        return True

    def _settings(self) -> dict[str, Any]:
        """What a trajectory depends on: not where files go, and not how long it is."""
        free = ("output_dir", "steps", "save_every", "eval_every", "eval_generation", "rollout_batch_size", "use_cpu")
        return {name: value for name, value in self.args.as_dict().items() if name not in free}

    def _folder(self) -> Path:
        if self.args.output_dir is None:
            raise InputError("output_dir is not set: there is no folder for checkpoints")
        return Path(self.args.output_dir)

    def _log_settings(self) -> None:
        if self.args.output_dir and self.accelerator.is_main_process:
            folder = self._folder()
            folder.mkdir(parents=True, exist_ok=True)
            settings = self.args.as_dict() | {
                "normalize": self.normalize,
                "shrink": self.shrink,
                "responses_per_step": self.args.responses_per_step,
            }
            (folder / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        if self.args.output_dir and self.accelerator.is_main_process:
            folder = self._folder()
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _record(self, experience: Experience) -> dict[str, Any]:
        outcome = experience.rewards.outcome
        mean = outcome.nanmean()
        return {
            "reward": float(mean),
            "reward_variance": float((outcome - mean).square().nanmean()),
            "tasks": len(experience.kept),
            "kept": int(experience.kept.sum()),
            "cut_off": sum(trace.hit_limit for trace in experience.traces) / len(experience.traces),
            "calls": sum(int(trace.step_map.max()) for trace in experience.traces) / len(experience.traces),
        }

    def _tell(self, event: str, record: dict[str, Any]) -> None:
        for callback in self.callbacks:
            told = getattr(callback, event, None)
            if told is not None:
                told(self, record)

    # Processes

    def _sum(self, count: int) -> int:
        if self.accelerator.num_processes == 1:
            return count
        return int(self.accelerator.reduce(torch.tensor(count, device=self.device), "sum"))

    def _most(self, count: int) -> int:
        if self.accelerator.num_processes == 1:
            return count
        return int(self.accelerator.gather(torch.tensor([count], device=self.device)).max())

    def _any(self, mine: bool) -> bool:
        return self._sum(int(mine)) > 0

    @contextmanager
    def _synced_at(self, model: Any, last: bool) -> Iterator[None]:
        """Gradients travel between processes with the last forward of an update only."""
        if last or self.accelerator.num_processes == 1:
            yield
        else:
            with self.accelerator.no_sync(model):
                yield


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start
