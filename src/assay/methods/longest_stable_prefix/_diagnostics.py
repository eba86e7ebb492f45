"""Why a run was fast or slow: what each step commits, how often predictions flip, how many islands are frozen."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.mdlm import Commit, Draft, GenState, Scheduler


class Diagnostics:
    """Writes into ``state.stats`` what the steps of a run do, one entry a row of the call.

    ``commit_lengths`` and ``active_lengths`` (places with a prediction), a list of steps; ``fragments``: maximal runs of
    committed columns among the generated ones after each step; ``flips`` and ``flip_pairs``: of how many places that were
    active in two consecutive forwards how many changed their most likely token; ``flip_rate``: their quotient over all
    rows, None without pairs; ``max_new_tokens``.

    Parameters
    ----------
    state
        At `Scheduler.reset`.
    """

    def __init__(self, state: GenState) -> None:
        rows, device = len(state.rows), state.x.device
        self._last = torch.full((rows, state.length), -1, device=device)
        state.stats |= {
            "max_new_tokens": state.config.max_new_tokens,
            **{name: [[] for _ in range(rows)] for name in ("commit_lengths", "active_lengths", "fragments")},
            "flips": [0] * rows,
            "flip_pairs": [0] * rows,
            "flip_rate": None,
        }

    def compare(self, state: GenState, draft: Draft) -> Int[Tensor, "B 2"]:
        """Flips and pairs of each row in this forward, on the device; remembers its predictions."""
        # without noise the draft's tokens are the most likely ones
        best = draft.tokens if state.config.temperature == 0 else draft.raw.argmax(-1)
        rows, columns = state.rows.to(best.device)[:, None], draft.positions.to(best.device)
        before = self._last[rows, columns]
        pairs = draft.masked & (before >= 0)
        self._last[rows, columns] = torch.where(draft.masked, best, before)
        return torch.stack([(pairs & (best != before)).sum(1), pairs.sum(1)], 1)

    def record(
        self, state: GenState, sizes: list[int], active: list[int], fragments: list[int], flips: list[tuple[int, int]]
    ) -> None:
        """Note one step: a number a row of the state, ``flips`` the rows of `compare`. Rows without candidates are passed over."""
        stats = state.stats
        for place, row in enumerate(state.rows.tolist()):
            if not active[place]:
                continue
            stats["commit_lengths"][row].append(sizes[place])
            stats["active_lengths"][row].append(active[place])
            stats["fragments"][row].append(fragments[place])
            stats["flips"][row] += flips[place][0]
            stats["flip_pairs"][row] += flips[place][1]
        pairs = sum(stats["flip_pairs"])
        stats["flip_rate"] = sum(stats["flips"]) / pairs if pairs else None


def fragments_after(state: GenState, positions: list[Tensor]) -> list[int]:
    """Maximal runs of committed columns among the generated ones, once each row's positions (CPU) are committed."""
    frozen = ~state.masked
    for row, columns in enumerate(positions):
        frozen[row, columns] = True
    frozen = frozen[:, state.canvas_start :]
    starts = frozen & ~torch.nn.functional.pad(frozen[:, :-1], (1, 0), value=False)
    return starts.sum(1).tolist()


class Watched(Scheduler):
    """Any scheduler, with the diagnostics of `LongestStablePrefix`: flips, fragments, commit and active lengths.

    They are in ``DiffusionOutput.stats``; see `Diagnostics`. What is generated does not change.

    Parameters
    ----------
    scheduler
        The one that decides.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    @property
    def name(self) -> str:
        """That of the scheduler."""
        return self.scheduler.name

    def reset(self, state: GenState) -> None:
        """Start both anew."""
        self.scheduler.reset(state)
        self._diagnostics = Diagnostics(state)

    def candidates(self, state: GenState) -> tuple[int, int] | Int[Tensor, "B 2"]:
        """Those of the scheduler."""
        return self.scheduler.candidates(state)

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """That of the scheduler, noted."""
        flips = [(a, b) for a, b in self._diagnostics.compare(state, draft).tolist()]
        commit = self.scheduler.commit(state, logits, draft)
        positions = [columns.cpu() for columns in commit.positions]
        sizes = [len(columns) for columns in positions]
        active = draft.masked.sum(1).tolist()
        self._diagnostics.record(state, sizes, active, fragments_after(state, positions), flips)
        return commit
