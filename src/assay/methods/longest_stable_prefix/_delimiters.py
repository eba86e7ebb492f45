"""What a token id means as text: which ids end a unit of text, start a word, or hold a part of a character."""

import json
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from assay._errors import InputError

Profile = Literal["text", "code", "cjk"]
Delimiters = Profile | Iterable[int] | Callable[[str], bool] | Tensor | None

_ENDS = {
    "text": tuple(".,;:!?)]}\"'。，、；：！？」』）"),
    "code": tuple(";:})"),
    "cjk": tuple("。，、；：！？」』）"),
}
_CJK = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7AF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


def delimiter_mask(
    tokenizer: Any, profile: Profile | Iterable[int] | Callable[[str], bool] = "text"
) -> Bool[Tensor, "vocab"]:
    """Which ids are delimiters: tokens after which a text may well be cut.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer, or the text of each id as a list of strings.
    profile
        ``"text"``: the token, without spaces at its end, ends in a mark of punctuation (``. , ; : ! ?``), a closing
        bracket or quote, or one of their CJK forms; or it holds a line break. ``"code"``: it ends in ``; : } )``, or
        holds a line break. ``"cjk"``: CJK marks and line breaks. Under each of them the tokenizer's EOS is one too. Or
        ids; or a predicate on the token's text.

    Returns
    -------
    (vocab,) bool
        A piece of an incomplete character is never a delimiter.

    Raises
    ------
    InputError
        If the profile is unknown, an id is not a whole number or lies outside the vocabulary, or the tokenizer is a name.

    Source: ours; the paper's list is not published.
    """
    pieces = token_bytes(tokenizer)
    if not isinstance(profile, str) and not callable(profile):
        return mask_of_ids(profile, len(pieces))
    if isinstance(profile, str) and profile not in _ENDS:
        raise InputError(f"there is no delimiter profile {profile!r}: use text, code or cjk, or give token ids")
    ends = profile if callable(profile) else _ends_of(_ENDS[profile])
    found = [ends(text) if (text := _text(piece)) else False for piece in pieces]
    mask = torch.tensor(found, dtype=torch.bool)
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is not None and isinstance(profile, str):
        mask[eos] = True
    return mask


def mask_of_ids(ids: Iterable[int], size: int) -> Bool[Tensor, "vocab"]:
    """(size,) bool, True at the ids; raises InputError if one lies outside."""
    mask = torch.zeros(size, dtype=torch.bool)
    for token in checked_ids(ids):
        if not 0 <= token < size:
            raise InputError(
                f"delimiter id {token} lies outside the vocabulary of {size}: give ids from 0 to {size - 1}"
            )
        mask[token] = True
    return mask


def checked_ids(ids: Iterable[Any]) -> list[int]:
    """The ids as int; raises InputError if one is no whole number, as where a mask is given in place of ids."""
    found = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    for token in found:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InputError(f"delimiter id {token!r} is not a whole number: give token ids, such as [13, 198]")
    return [int(token) for token in found]


def word_starts(tokenizer: Any) -> Bool[Tensor, "vocab"]:
    """Which ids start a new word: those that begin with a space, a mark or a CJK character, and special tokens."""
    return torch.tensor([_starts_word(piece) for piece in token_bytes(tokenizer)], dtype=torch.bool)


def token_bytes(tokenizer: Any) -> list[bytes]:
    """What each id adds to a text, in UTF-8; nothing for special tokens.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer (byte-level, SentencePiece, or whole words), or the text of each id as a list of strings.
    """
    if isinstance(tokenizer, str):
        raise InputError(
            f"tokenizer is the text {tokenizer!r}: give the tokenizer itself, or a list with the text of each id"
        )
    if isinstance(tokenizer, Sequence):
        return [text.encode() for text in tokenizer]
    size = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    special = set(tokenizer.all_special_ids)
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if not token.special}
    special |= {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = _decoders(getattr(backend, "decoder", None))
    if "ByteLevel" in kinds:
        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}

        def read(token: str) -> bytes:
            if all(char in byte_of for char in token):
                return bytes(byte_of[char] for char in token)
            return token.encode()
    else:

        def read(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()

    pieces = []
    for id, token in enumerate(tokens):
        if token is None or id in special:
            pieces.append(b"")
        else:
            pieces.append(token.encode() if id in added else read(token))
    return pieces


def _decoders(decoder: Any) -> set[str]:
    """The types of a tokenizer's decoder and of those inside it."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {state["type"], *(inner["type"] for inner in state.get("decoders", ()))}


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _text(piece: bytes) -> str:
    """The piece's text; empty if it holds a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return ""


def _ends_of(marks: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda text: "\n" in text or text.rstrip(" ").endswith(marks)


def _starts_word(piece: bytes) -> bool:
    first = piece.decode(errors="ignore")[:1]
    if not first:
        return not piece
    return not first.isalnum() or any(low <= ord(first) <= high for low, high in _CJK)


class Characters:
    """Where a text made of tokens ends on a whole character.

    Parameters
    ----------
    tokenizer
        As for `token_bytes`.
    """

    def __init__(self, tokenizer: Any) -> None:
        states = [_character_state(piece) for piece in token_bytes(tokenizer)]
        self._missing = torch.tensor([missing for missing, _ in states])
        self._adds = torch.tensor([adds for _, adds in states])

    @property
    def split(self) -> bool:
        """Whether any token ends inside of a character."""
        return bool((self._missing > 0).any())

    def to(self, device: torch.device, size: int) -> "Characters":
        """The same on a device, for ids below ``size``; those that the tokenizer lacks are whole."""
        if self._missing.device != device or len(self._missing) < size:
            more = max(0, size - len(self._missing))
            self._missing = torch.nn.functional.pad(self._missing, (0, more)).to(device)
            self._adds = torch.nn.functional.pad(self._adds, (0, more)).to(device)
        return self

    def whole(self, tokens: Int[Tensor, "B w"]) -> Bool[Tensor, "B w"]:
        """Whether the text up to and with each token ends on a whole character.

        What stands before the first token counts as whole.
        """
        adds = self._adds[tokens]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        start = torch.where(adds == 0, place, -1).cummax(1).values  # the last token that starts a character
        added = adds.cumsum(1)
        at = start.clamp(min=0)
        missing = self._missing[tokens.gather(1, at)] - (added - added.gather(1, at))
        return (start < 0) | (missing <= 0)


def _character_state(piece: bytes) -> tuple[int, int]:
    """How many bytes a character lacks behind the piece; and how many bytes it adds to one begun before, if it is only that."""
    for back, byte in enumerate(reversed(piece[-4:]), 1):
        if byte < 0x80:
            return 0, 0
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return max(length - back, 0), 0
    return 0, len(piece)
