"""What Guided Diffusion is weighed against: speculative diffusion decoding."""

import time

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import Commit, Draft, GenState, Scheduler

from ._aligner import TokenAligner
from ._guided import DraftedRow, begin_account, left_to_right, note
from ._guider import ARGuider
from ._matching import MatchResult, MatchRule, Rule

__all__ = ["SpeculativeDiffusionScheduler", "accept_speculated"]


class SpeculativeDiffusionScheduler(Scheduler):
    """Speculative diffusion decoding (SDD): the diffusion model drafts, and the autoregressive model's tokens count.

    Fills the same stats as `GuidedScheduler`; ``accepted`` counts the drafts that were kept, not the autoregressive model's
    own token behind them.

    Parameters
    ----------
    guider
        The target model. Its ids must be those of the diffusion model.
    exact
        True: drafts are kept by the rejection rule of `accept_speculated`, and the answer is distributed as sampling from
        the target model, whatever the diffusion model says. With a temperature of 0 the drafts are the most likely
        tokens, a point mass. False: the target's most likely token replaces the first draft that differs, so the
        answer is its greedy one.
    verify_chunk
        Drafts that the target reads at a time.
    aligner
        Between vocabularies; the ids must be passed on.

    Raises
    ------
    InputError
        If the aligner bridges over text: the two distributions then have no tokens in common.

    Source: Christopher et al. 2024 (arXiv:2408.05636), as the baseline of Hu et al. 2025 (arXiv:2505.21467).
    """

    def __init__(
        self, guider: ARGuider, exact: bool = False, verify_chunk: int = 32, aligner: TokenAligner | None = None
    ) -> None:
        if aligner is not None and (not aligner.identical or aligner.special):
            raise InputError(
                "speculative decoding compares the two models token by token: use a guider with the same vocabulary"
            )
        if verify_chunk < 1:
            raise InputError(f"verify_chunk is {verify_chunk}, expected at least one draft a forward")
        self.guider, self.exact, self.verify_chunk = guider, exact, verify_chunk

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"SpeculativeDiffusionScheduler(exact={self.exact}, verify_chunk={self.verify_chunk})"

    def reset(self, state: GenState) -> None:
        """Forget earlier runs.

        Raises
        ------
        InputError
            If masks of the prompt are to be filled in: the target model cannot see what stands right of them.
        """
        if state.config.allow_masks_in_prompt:
            raise InputError("speculative decoding writes from left to right: it cannot fill in masks of the prompt")
        begin_account(state)
        self.guider.reset(len(state.rows))

    def candidates(self, state: GenState) -> Int[Tensor, "B 2"]:
        """From the leftmost mask of each row to the end."""
        return left_to_right(state)

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """The kept drafts of each row, and behind them one token of the target model where a candidate is left."""
        drafted, masked = draft.tokens.cpu(), draft.masked.cpu()
        positions: list[Tensor] = []
        tokens: list[Tensor] = []
        logp: list[Tensor] = []
        for row in range(len(masked)):
            asked = DraftedRow.of(state, draft, drafted, masked, row)
            written: list[int] = []
            weights: list[float] = []
            if asked is not None:
                start = time.perf_counter()
                written, weights, result = self._speculate(state, draft, asked, row)
                note(state, row, result, time.perf_counter() - start)
                if state.config.eos_policy == "fill" and state.eos_id in written:
                    written = written[: written.index(state.eos_id) + 1]
            places = torch.tensor(asked.places[: len(written)] if asked is not None else [], dtype=torch.long)
            positions.append(draft.positions.cpu()[places])
            tokens.append(torch.tensor(written, dtype=torch.long))
            logp.append(torch.tensor(weights[: len(written)], dtype=torch.float64))
        return Commit(positions, tokens, logp)

    def _speculate(
        self, state: GenState, draft: Draft, asked: DraftedRow, row: int
    ) -> tuple[list[int], list[float], MatchResult]:
        """The tokens to write, their log-probabilities under the target model, and what was kept at which cost."""
        guider, number, drafts = self.guider, int(state.rows[row]), asked.tokens
        hidden = [state.mask_id]
        if state.config.eos_policy == "suppress" and state.eos_id is not None:
            hidden.append(state.eos_id)
        size = draft.raw.shape[-1]
        rule: Rule = MatchRule("exact")
        proposal = None
        if self.exact:
            logits = draft.logits[row, torch.tensor(asked.places, device=draft.raw.device)].double()
            if state.config.temperature:
                proposal = logits.softmax(1).cpu()
            else:
                proposal = torch.zeros(logits.shape, dtype=torch.float64)
                proposal[torch.arange(len(drafts)), torch.tensor(drafts)] = 1
            rule = _Rejection(proposal, hidden)
        result = guider.match(asked.prefix, drafts, rule, self.verify_chunk, row=number, generator=state.generator)
        k = result.k
        judged = [] if result.probs is None else list(target_distribution(result.probs.cpu(), size, hidden))
        written = drafts[:k]
        if k < len(drafts):
            if len(judged) == k:  # the draft is no token of the target's: it was refused unread
                probs, fed = guider.next_distribution([*asked.prefix, *written], row=number)
                judged.append(target_distribution(probs.cpu()[None], size, hidden)[0])
                result = MatchResult(k, k, None, result.forwards + 1, result.tokens + fed)
            own = judged[k]
            if proposal is not None:
                left = (own - proposal[k]).clamp(min=0)
                left = left if bool(left.sum() > 0) else own
                token = int(torch.multinomial(left.to(state.generator.device), 1, generator=state.generator))
            else:
                token = int(own.argmax())
            written = [*written, token]
        weights = [float(probs[token].log()) for probs, token in zip(judged, written)]
        return written, weights, result


class _Rejection:
    """The rejection rule as a guider's rule: row j of the proposal is that of the j-th draft it is asked about."""

    random = True

    def __init__(self, proposal: Float[Tensor, "n V"], hidden: list[int]) -> None:
        self._proposal, self._hidden, self._asked = proposal, hidden, 0

    def agrees(
        self, probs: Float[Tensor, "n Q"], drafts: Int[Tensor, " n"], uniform: Float[Tensor, " n"] | None = None
    ) -> Bool[Tensor, " n"]:
        assert uniform is not None
        proposal = self._proposal[self._asked : self._asked + len(drafts)]
        self._asked += len(drafts)
        target = target_distribution(probs.cpu(), proposal.shape[1], self._hidden)
        return accept_speculated(proposal, target, drafts.cpu(), uniform.cpu().double()).to(probs.device)


def accept_speculated(
    proposal: Float[Tensor, "n V"],
    target: Float[Tensor, "n V"],
    drafts: Int[Tensor, " n"],
    uniform: Float[Tensor, " n"],
) -> Bool[Tensor, " n"]:
    """Whether each draft by itself is kept: with probability min(1, target / proposal) of the draft.

    Parameters
    ----------
    proposal, target : (n, V)
        Distributions; drafts were sampled from the first.
    drafts : (n,)
    uniform : (n,)
        U(0, 1).

    Source: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1.
    """
    p, q = (x.gather(1, drafts[:, None])[:, 0] for x in (proposal, target))
    return uniform * p < q


def target_distribution(probs: Float[Tensor, "n Q"], size: int, hidden: list[int]) -> Float[Tensor, "n size"]:
    """The target model's distributions over the ``size`` ids of the diffusion model, without the hidden ones, in float64."""
    own = torch.zeros(len(probs), size, dtype=torch.float64)
    shared = min(size, probs.shape[1])
    own[:, :shared] = probs[:, :shared].double()
    own[:, hidden] = 0
    return own / own.sum(1, keepdim=True)
