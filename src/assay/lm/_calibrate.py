"""Through a network block by block, with two streams of hidden states: what each layer is fed now, and was fed originally."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from assay._errors import InputError
from assay.lm._blocks import blocks, groups, inputs_of, is_linear, replace, run_block, weight_of
from assay.lm._stats import LayerStats

log = logging.getLogger("assay.lm")

Batch = Mapping[str, Tensor] | Int[Tensor, "_ _"]


class Site(NamedTuple):
    """A Linear to be replaced, and what is known of its inputs.

    Attributes
    ----------
    block, name
        Number of its block, and its name in that.
    linear
        As it is in the model.
    stats
        Of its inputs; Linears of one group share them.
    """

    block: int
    name: str
    linear: nn.Module
    stats: LayerStats


@runtime_checkable
class Tokenizer(Protocol):
    """What `windows` asks of a tokenizer of transformers."""

    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Token ids of a text, as ``input_ids``."""


def windows(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, length: int, *, seed: int | None = 0, skip: int = 0
) -> Int[Tensor, "count length"]:
    """Windows of tokens out of texts, from as many texts as there are before a second one from any.

    Parameters
    ----------
    texts
        Each is tokenised alone, without special tokens.
    count, length
        Of the windows, and of each in tokens.
    seed
        Of the order of the texts, and of where a window begins in one; None: the texts as they come, from ``skip`` on.
    skip
        Tokens left out at the start of each text.

    Raises
    ------
    InputError
        If the texts do not hold so many windows that do not overlap.
    """
    if count < 1 or length < 2 or skip < 0:
        raise InputError(
            f"{count} windows of {length} tokens behind {skip} cannot be cut: give at least one, of two tokens"
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    order = range(len(texts)) if generator is None else torch.randperm(len(texts), generator=generator).tolist()
    first: list[Tensor] = []
    later: list[Tensor] = []  # from texts that have given one already
    for number in order:
        ids = torch.as_tensor(tokenizer(texts[number], add_special_tokens=False)["input_ids"], dtype=torch.int64)[skip:]
        held = len(ids) // length
        if not held:
            continue
        spare = len(ids) - held * length
        begin = 0 if generator is None else int(torch.randint(spare + 1, (1,), generator=generator))
        pieces = list(ids[begin : begin + held * length].split(length))
        chosen = 0 if generator is None else int(torch.randint(held, (1,), generator=generator))
        first.append(pieces.pop(chosen))
        later += pieces
        if len(first) == count:
            return torch.stack(first)
    if len(first) + len(later) < count:
        raise InputError(
            f"the texts hold {len(first) + len(later)} windows of {length} tokens, not {count}: give more text, or ask for "
            "fewer or shorter ones"
        )
    if generator is not None:
        later = [later[i] for i in torch.randperm(len(later), generator=generator).tolist()]
    return torch.stack(first + later[: count - len(first)])


@torch.no_grad()
def walk(
    model: nn.Module,
    batches: Sequence[Batch],
    visit: Callable[[Site], nn.Module | None],
    *,
    inputs: str = "compressed",
    reference: bool = True,
    targets: Sequence[str] | None = None,
    limit: int | None = None,
    clip: float | None = None,
    device: torch.device | str | None = None,
    offload: str | None = None,
    dtype: torch.dtype = torch.float32,
    on_block: Callable[[int, int, float | None], None] | None = None,
) -> None:
    """Replace the Linears of a model one group after the other, each knowing what it is fed.

    Two streams of hidden states go through the blocks: those of the original network, and those of the one that is being
    changed. In a block, the groups are taken in the order of the data; a group's statistics are gathered with the groups
    before it replaced. Memory: the model, a copy of one block, one batch inside it, and the streams.

    In a process group of ``torch.distributed`` each process gives its own batches, and the statistics are those of all.

    Parameters
    ----------
    batches
        Token ids (rows, tokens), or ``input_ids`` with an ``attention_mask`` where there is padding.
    visit
        Called for each Linear; what it returns takes its place, None leaves it.
    inputs
        ``"compressed"``: of the network as it has been changed so far. ``"original"``: of the untouched one, in one forward
        in all.
    reference
        Whether ``Delta`` is wanted: without, the original stream is not computed.
    targets
        Ends of the names of the Linears to visit, for a block whose layout is not known or to leave others as they are.
    limit
        Blocks to go through; None: all.
    clip
        Rows of inputs longer than so many times the median norm of their batch are cut to it (attention sinks).
    device
        Where a block is worked on; None: where it lies.
    offload
        Where the streams wait: with the blocks (None), in main memory (``"cpu"``), or in files (``"disk"``).
    dtype
        Of the statistics.
    on_block
        Told the number of the block that is done, of how many, and the mean cosine of the two streams behind it.

    Raises
    ------
    InputError
        If there is nothing to calibrate on, or an input is not finite (with the layer's name).

    Source: arXiv:2602.03051, Algorithm 1; the order within a block is that of GPTQ.
    """
    if not batches:
        raise InputError("there is no batch to calibrate on: give token ids")
    if inputs not in ("compressed", "original") or offload not in (None, "cpu", "disk"):
        raise InputError(
            f"inputs={inputs!r} and offload={offload!r}: inputs are 'compressed' or 'original', offload None, 'cpu' or 'disk'"
        )
    them = blocks(model)
    count = len(them) if limit is None else min(limit, len(them))
    was_training = model.training
    model.eval()
    with ExitStack() as stack:
        stack.callback(model.train, was_training)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="assay-streams-")) if offload == "disk" else None
        two = inputs == "compressed" and reference
        now = _Stream(offload, place, "now")
        original = _Stream(offload, place, "original") if two else None
        arguments, masks = [], []
        for batch in batches:
            given = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
            home = next(model.parameters()).device
            entering = inputs_of(model, {name: part.to(home) for name, part in given.items()})
            now.append(entering.hidden)
            if original is not None:
                original.append(entering.hidden)
            arguments.append(entering.arguments)
            masks.append(given["attention_mask"].bool() if "attention_mask" in given else None)
        for number in range(count):
            block = them[number]
            home = next(block.parameters()).device
            where = torch.device(device) if device is not None else home
            block.to(where)
            work = _Work(where, number, [_moved(a[number], where) for a in arguments], masks, clip, dtype)
            if inputs == "original":
                work.untouched(block, now, visit, targets)
            else:
                work.in_order(block, now, original, visit, targets)
            block.to(home)
            if on_block is not None:
                on_block(number, count, None if original is None else work.cosine(now, original))


class _Stream:
    """Hidden states of the batches between two blocks: here, in main memory or in files."""

    def __init__(self, offload: str | None, folder: str | None, name: str) -> None:
        self.offload, self.folder, self.name = offload, folder, name
        self.held: list[Tensor | Path] = []

    def append(self, hidden: Tensor) -> None:
        self.held.append(self._put(len(self.held), hidden))

    def __getitem__(self, index: int) -> Tensor:
        held = self.held[index]
        return held if isinstance(held, Tensor) else torch.load(held, weights_only=True)

    def __setitem__(self, index: int, hidden: Tensor) -> None:
        self.held[index] = self._put(index, hidden)

    def __len__(self) -> int:
        return len(self.held)

    def _put(self, index: int, hidden: Tensor) -> Tensor | Path:
        if self.offload is None:
            return hidden
        if self.folder is None:
            return hidden.to("cpu")
        path = Path(self.folder) / f"{self.name}-{index}.pt"
        torch.save(hidden.to("cpu"), path)
        return path


class _Enough(Exception):
    """Leaves a block that has said what was asked."""


class _Work:
    """One block."""

    def __init__(
        self,
        where: torch.device,
        number: int,
        arguments: list[dict[str, Any]],
        masks: list[Tensor | None],
        clip: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.where, self.number, self.arguments, self.masks = where, number, arguments, masks
        self.clip, self.dtype = clip, dtype

    def in_order(
        self,
        block: nn.Module,
        now: _Stream,
        original: _Stream | None,
        visit: Callable[[Site], nn.Module | None],
        targets: Sequence[str] | None,
    ) -> None:
        before = copy.deepcopy(block) if original is not None else None
        found = self._groups(block, now[0].to(self.where), targets)
        for place, group in enumerate(found):
            name = next(iter(group))
            stats = self._stats(group[name])
            last = place == len(found) - 1
            for batch in range(len(now)):
                x = self._input(block, name, now[batch].to(self.where), batch)[0]
                reference = None
                if before is not None and original is not None:
                    reference, after = self._input(before, name, original[batch].to(self.where), batch, to_the_end=last)
                    if last:
                        original[batch] = after
                self._add(stats, name, x, reference, batch)
            self._replace(block, group, stats, visit)
        for batch in range(len(now)):
            now[batch] = run_block(block, now[batch].to(self.where), self.arguments[batch])
            if not found and original is not None:
                original[batch] = run_block(block, original[batch].to(self.where), self.arguments[batch])

    def untouched(
        self,
        block: nn.Module,
        stream: _Stream,
        visit: Callable[[Site], nn.Module | None],
        targets: Sequence[str] | None,
    ) -> None:
        found = self._groups(block, stream[0].to(self.where), targets)
        firsts = [next(iter(group)) for group in found]
        stats = [self._stats(group[name]) for group, name in zip(found, firsts, strict=True)]
        for batch in range(len(stream)):
            caught: dict[str, Tensor] = {}
            hooks = [
                block.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, name=name, caught=caught: caught.__setitem__(name, args[0])
                )
                for name in firsts
            ]
            try:
                stream[batch] = run_block(block, stream[batch].to(self.where), self.arguments[batch])
            finally:
                for hook in hooks:
                    hook.remove()
            for name, one in zip(firsts, stats, strict=True):
                self._add(one, name, caught[name], None, batch)
        for group, one in zip(found, stats, strict=True):
            self._replace(block, group, one, visit)

    def cosine(self, now: _Stream, original: _Stream) -> float:
        total, count = 0.0, 0
        for batch, mask in enumerate(self.masks):
            here, there = now[batch].float(), original[batch].float()
            found = cosine_similarity(here, there, dim=-1)
            found = found if mask is None else found[mask.to(found.device)]
            total, count = total + float(found.double().sum()), count + found.numel()
        return total / count

    def _groups(self, block: nn.Module, hidden: Tensor, targets: Sequence[str] | None) -> list[dict[str, nn.Module]]:
        if targets is None:
            return groups(block)
        found = groups_in_a_forward(block, hidden, self.arguments[0])
        wanted = [
            {n: m for n, m in group.items() if any(f".{n}".endswith(f".{t}") for t in targets)} for group in found
        ]
        return [group for group in wanted if group]

    def _input(
        self, block: nn.Module, name: str, hidden: Tensor, batch: int, to_the_end: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What a Linear of the block is fed, and what comes out of the block where it is run to its end."""
        caught: list[Tensor] = []

        def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            if not to_the_end:
                raise _Enough

        hook = block.get_submodule(name).register_forward_pre_hook(look)
        after = hidden
        try:
            after = run_block(block, hidden, self.arguments[batch])
        except _Enough:
            pass
        finally:
            hook.remove()
        return caught[0], after

    def _stats(self, linear: nn.Module) -> LayerStats:
        return LayerStats(weight_of(linear).shape[1], self.dtype, self.where)

    def _add(self, stats: LayerStats, name: str, x: Tensor, reference: Tensor | None, batch: int) -> None:
        try:
            stats.update(
                _clipped(x, self.clip),
                None if reference is None else _clipped(reference, self.clip),
                self.masks[batch],
            )
        except InputError as error:
            raise InputError(f"block {self.number}, {name}: {error}") from error

    def _replace(
        self,
        block: nn.Module,
        group: dict[str, nn.Module],
        stats: LayerStats,
        visit: Callable[[Site], nn.Module | None],
    ) -> None:
        if dist.is_available() and dist.is_initialized():
            stats.all_reduce()
        for name, linear in group.items():
            try:
                made = visit(Site(self.number, name, linear, stats))
            except InputError as error:
                raise InputError(f"block {self.number}, {name}: {error}") from error
            if made is not None:
                replace(block, name, made)


@torch.no_grad()
def groups_in_a_forward(
    block: nn.Module, hidden: Float[Tensor, "rows tokens features"], arguments: Mapping[str, Any]
) -> list[dict[str, nn.Module]]:
    """The Linears of any block, by who reads the same tensor, in the order in which a forward comes to them.

    A Linear that the forward does not come to (an expert without tokens) is left out.
    """
    found: list[tuple[Tensor, dict[str, nn.Module]]] = []

    def look(name: str, module: nn.Module, x: Tensor) -> None:
        for read, group in found:
            if read is x:
                group[name] = module
                return
        found.append((x, {name: module}))

    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: look(name, m, args[0]))
        for name, module in block.named_modules()
        if is_linear(module)
    ]
    try:
        run_block(block, hidden, arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return [group for _, group in found]


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    if clip is None:
        return x
    norms = x.norm(dim=-1, keepdim=True)
    longest = clip * norms.median()
    return x * (longest / norms.clamp_min(longest)) if longest > 0 else x


def _moved(arguments: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """The arguments of a block on another device, tuples of tensors too."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(where)
        return tuple(move(part) for part in value) if isinstance(value, tuple) else value

    return {name: move(value) for name, value in arguments.items()}


def as_batches(tokens: Int[Tensor, "rows tokens"], batch_size: int) -> Iterator[Int[Tensor, "rows tokens"]]:
    """Rows of tokens, so many at a time."""
    if batch_size < 1:
        raise InputError(f"a batch of {batch_size} is none: give at least 1")
    yield from tokens.split(batch_size)
