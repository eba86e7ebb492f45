"""Between two vocabularies: the same ids, or a bridge over the text that the tokens spell."""

import codecs
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from assay._errors import InputError

from ._matching import Guider, MatchResult, Rule


class TokenizerMismatchError(InputError):
    """Ids of the two models do not mean the same text, and no aligner was given."""


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """The bytes that each id of a tokenizer stands for; None for special tokens and ids without a token.

    Parameters
    ----------
    tokenizer
        A fast tokenizer of transformers: byte-level BPE, or a SentencePiece vocabulary with ``▁`` for spaces.

    Raises
    ------
    InputError
        If it is of neither kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{type(tokenizer).__name__} is no fast tokenizer: load it by AutoTokenizer with tokenizer.json"
        )
    scheme = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    if "ByteLevel" in scheme:
        spell = _byte_level()
    elif "▁" in scheme:
        spell = _spell_pieces
    else:
        raise InputError(
            "the tokenizer is neither byte-level nor of SentencePiece's kind, so the bytes of a token are unknown: use "
            "models with such tokenizers"
        )
    size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    added = {int(i): (token.content, token.special) for i, token in tokenizer.added_tokens_decoder.items()}
    special = set(tokenizer.all_special_ids)
    found: list[bytes | None] = [None] * size
    for text, i in tokenizer.get_vocab().items():
        if i in added:
            content, is_special = added[i]
            found[i] = None if is_special or i in special else content.encode()
        elif i not in special:
            found[i] = spell(text)
    return found


def _byte_level() -> Any:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    value = {sign: byte for byte, sign in bytes_to_unicode().items()}
    return lambda text: bytes(value[sign] for sign in text)


def _spell_pieces(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


def first_difference(ours: Any, theirs: Any, special: Mapping[int, int] | None = None) -> int | None:
    """The first id below both vocabulary sizes that stands for different text in two tokenizers; None if there is none.

    Ids of ``special`` are left out. Special tokens are compared by their names.
    """
    left, right = token_bytes(ours), token_bytes(theirs)
    mapped = set(special or {})
    for i in range(min(len(left), len(right))):
        if i in mapped or (left[i] is not None and left[i] == right[i]):
            continue
        if left[i] is None and right[i] is None and _name(ours, i) == _name(theirs, i):
            continue
        return i
    return None


def _name(tokenizer: Any, i: int) -> str | None:
    return tokenizer.convert_ids_to_tokens(i)


class TokenAligner:
    """Lets a guider judge drafts of a diffusion model that has another vocabulary.

    Where the two tokenizers give the same text to all ids that both have, ids are passed on, but for those in
    ``special``. Otherwise the drafts are spelled out, cut after the last whole character, and tokenized together with the
    text before them by the guider's tokenizer. The guider judges its own tokens; the drafts that end inside the text which
    it accepted are accepted.

    Parameters
    ----------
    ours
        The diffusion model's tokenizer.
    theirs
        The guider's.
    special
        Ids of ours that become other ids of theirs (one, or several in a row): ``{151643: 151645, 151645: 151643}`` swaps
        the two ends of text and of turn that Dream and a Qwen2.5 guider use. Over the bridge, special tokens that are
        not named here are left out of what the guider reads, and are never agreed with.

    Attributes
    ----------
    identical
        Whether ids are passed on.
    difference
        The first id that stands for different text, or None.

    Notes
    -----
    Tokens are never re-tokenized one at a time: a character may be spread over several of them. The text bridge is ours;
    the paper leaves other vocabularies open, and its code re-tokenizes single tokens.
    """

    def __init__(self, ours: Any, theirs: Any, special: Mapping[int, int | Sequence[int]] | None = None) -> None:
        self.special = {i: [to] if isinstance(to, int) else list(to) for i, to in (special or {}).items()}
        single = {i: to[0] for i, to in self.special.items() if len(to) == 1}
        self.difference = first_difference(ours, theirs, single)
        self.identical = self.difference is None
        self._theirs = theirs
        self._our_bytes = token_bytes(ours)
        self._their_bytes = token_bytes(theirs)

    @classmethod
    def same_ids(cls, ours: Any, theirs: Any, special: Mapping[int, int] | None = None) -> "TokenAligner":
        """An aligner that passes ids on.

        Raises
        ------
        TokenizerMismatchError
            If an id stands for different text; names the first.
        """
        aligner = cls(ours, theirs, special)
        if aligner.difference is not None:
            i = aligner.difference
            raise TokenizerMismatchError(
                f"id {i} is {_name(ours, i)!r} to the diffusion model and {_name(theirs, i)!r} to the guider: give an "
                "aligner, TokenAligner(tokenizer, guider.tokenizer), which bridges over the text"
            )
        return aligner

    def judge(
        self,
        guider: Guider,
        prefix: Sequence[int],
        drafts: Sequence[int],
        rule: Rule,
        chunk: int = 32,
        *,
        row: int = 0,
        judged: Sequence[bool] | None = None,
        generator: torch.Generator | None = None,
    ) -> MatchResult:
        """How many drafts the guider agrees with; the arguments are those of `ARGuider.match`, in our ids.

        Over the bridge ``probs`` are those of the guider's own tokens, and ``rejected_at`` counts our drafts.
        """
        wanted = [True] * len(drafts) if judged is None else list(judged)
        if self.identical:
            theirs = [self._passed(token) for token in drafts]
            before = [token for ours in prefix for token in self.special.get(ours, [ours])]
            return guider.match(before, theirs, rule, chunk, row=row, judged=wanted, generator=generator)
        return self._over_text(guider, prefix, drafts, wanted, rule, chunk, row, generator)

    def _passed(self, token: int) -> int:
        to = self.special.get(token, [token])
        return to[0] if len(to) == 1 else -1  # a token that becomes several is never agreed with

    def _over_text(
        self,
        guider: Guider,
        prefix: Sequence[int],
        drafts: Sequence[int],
        wanted: list[bool],
        rule: Rule,
        chunk: int,
        row: int,
        generator: torch.Generator | None,
    ) -> MatchResult:
        before, text = self._read(prefix)
        spelled = [None if token in self.special else self._bytes(token) for token in drafts]
        stop = spelled.index(None) if None in spelled else len(spelled)
        ends = list(accumulate(len(piece) for piece in spelled[:stop] if piece is not None))
        span = b"".join(piece for piece in spelled[:stop] if piece is not None)
        ids, offsets = self._tokens(text, span)
        first = next((j for j, end in enumerate(offsets) if end > 0), len(ids))
        before, asked = [*before, *ids[:first]], ids[first:]
        whole = (bool(offsets) and offsets[-1] == len(span)) or not span
        closing = self.special.get(drafts[stop], []) if stop < len(drafts) else []
        if whole and len(closing) == 1:
            asked = [*asked, closing[0]]
        start = getattr(self._theirs, "bos_token_id", None)
        if start is not None and before[:1] != [start]:
            before = [start, *before]
        if not asked or not before:
            return MatchResult(0, 0)
        result = guider.match(before, asked, rule, chunk, row=row, generator=generator)
        accepted = offsets[first + min(result.k, len(ids) - first) - 1] if result.k and len(ids) > first else 0
        agreed = sum(end <= accepted for end in ends)
        if result.k == len(asked) and whole and len(closing) == 1:
            agreed = stop + 1
        k = sum(wanted[:agreed])
        refused = agreed if agreed < len(drafts) else None
        return MatchResult(k, refused, result.probs, result.forwards, result.tokens)

    def _bytes(self, token: int) -> bytes | None:
        return self._our_bytes[token] if 0 <= token < len(self._our_bytes) else None

    def _read(self, prefix: Sequence[int]) -> tuple[list[int], bytes]:
        """Their tokens of what lies before the last special token, and the bytes of what follows it."""
        before: list[int] = []
        text = b""
        for token in prefix:
            spelled = self._bytes(token)
            if spelled is not None and token not in self.special:
                text += spelled
                continue
            before += self._encode(text.decode(errors="replace")) + self.special.get(token, [])
            text = b""
        return before, text

    def _tokens(self, text: bytes, span: bytes) -> tuple[list[int], list[int]]:
        """Their tokens of text and span, and where each ends, counted from the span's first byte.

        Only what they spell faithfully: no cut character, nothing that their tokenizer would rewrite.
        """
        joined = _whole_characters(text + span)
        if len(joined.encode()) > len(text):
            ids, ends, faithful = self._spelling(joined)
            if faithful > len(text):
                kept = sum(end <= faithful for end in ends)
                return ids[:kept], [end - len(text) for end in ends[:kept]]
        # What stands before does not decode, or their tokenizer rewrites it: the span on its own.
        before = self._encode(text.decode(errors="replace"))
        ids, ends, faithful = self._spelling(_whole_characters(span))
        kept = sum(end <= faithful for end in ends)
        return [*before, *ids[:kept]], [0] * len(before) + ends[:kept]

    def _spelling(self, text: str) -> tuple[list[int], list[int], int]:
        """Tokens of a text, where each ends, and up to which byte they spell what the text says."""
        ids = self._encode(text)
        pieces = [self._their_bytes[i] or b"" for i in ids]
        spelled, meant = b"".join(pieces), text.encode()
        same = next((n for n, (a, b) in enumerate(zip(spelled, meant)) if a != b), min(len(spelled), len(meant)))
        return ids, list(accumulate(map(len, pieces))), same

    def _encode(self, text: str) -> list[int]:
        return self._theirs.encode(text, add_special_tokens=False) if text else []


def _whole_characters(data: bytes) -> str:
    """The text of the longest beginning that is valid UTF-8."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def swapped_ends(ours: int | None, theirs: int | None) -> dict[int, int]:
    """The map for `TokenAligner` of two models with one vocabulary whose answers end by different tokens.

    Parameters
    ----------
    ours, theirs
        The end of an answer of the diffusion model, and of the guider.

    Returns
    -------
    Each becomes the other; empty if they are equal or one is missing.
    """
    if ours is None or theirs is None or ours == theirs:
        return {}
    return {ours: theirs, theirs: ours}
