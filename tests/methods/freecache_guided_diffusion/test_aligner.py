"""Between two vocabularies: what is the same is passed on, what is not is judged as text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from assay._errors import InputError
from assay.methods.freecache_guided_diffusion import (
    ARGuider,
    MatchResult,
    MatchRule,
    TokenAligner,
    TokenizerMismatchError,
    swapped_ends,
)
from assay.methods.freecache_guided_diffusion._aligner import token_bytes

from .conftest import Bigram

TEXT = [
    "the cat sat on the mat and the dog sat on the cat",
    "über naïve café 🙂🙃 and 12+30=42; the end",
    "aaaa bbbb abab",
]


def trained(size, specials=("<end>",), texts=TEXT):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[0])


A, B, BYTES = trained(300), trained(330, ("<stop>", "<pad>")), trained(257)
RULE = MatchRule()


class Reader:
    """A guider over text: agrees with tokens as long as the text that it has read continues its own."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.text, self.asked = tokenizer, text.encode(), []

    def reset(self, rows=1):
        pass

    def match(self, prefix, drafts, rule, chunk=32, *, row=0, judged=None, generator=None):
        spelled = token_bytes(self.tokenizer)
        read = b"".join(spelled[i] or b"" for i in prefix)
        self.asked.append((list(prefix), list(drafts)))
        k = 0
        for token in drafts:
            if spelled[token] is None or not self.text.startswith(read + spelled[token]):
                break
            read += spelled[token]
            k += 1
        return MatchResult(k, k if k < len(drafts) else None)


def bridge(**special):
    return TokenAligner(A, B, **special)


def test_bytes_of_tokens():
    spelled = token_bytes(A)
    assert spelled[A.eos_token_id] is None
    for text in TEXT:
        assert b"".join(spelled[i] for i in A.encode(text)) == text.encode()


def test_vocabularies_that_agree_are_passed_on():
    longer = trained(320)  # the same merges, and more
    aligner = TokenAligner.same_ids(A, longer)
    assert aligner.identical
    judge = Bigram([(i + 1) % 300 for i in range(300)])
    assert aligner.judge(ARGuider(judge), [7], [8, 9, 3], RULE).k == 2


def test_a_swap_is_applied_to_what_is_read_and_to_what_is_judged():
    special = swapped_ends(5, 6)
    assert special == {5: 6, 6: 5}
    aligner = TokenAligner.same_ids(A, A, special)
    judge = Bigram([(i + 1) % 300 for i in range(300)])
    assert aligner.judge(ARGuider(judge), [6], [6], RULE).k == 0  # reads 5, and is asked about 5
    assert aligner.judge(ARGuider(judge), [6], [5, 7], RULE).k == 2  # 5; 6, 7
    assert judge.calls[-1]["fed"] == [5, 6]
    assert swapped_ends(5, 5) == swapped_ends(None, 5) == {}


def test_the_first_id_that_differs_is_named():
    with pytest.raises(TokenizerMismatchError, match=r"id 0 is '<end>' .* '<stop>'.*TokenAligner"):
        TokenAligner.same_ids(A, B)
    aligner = TokenAligner(A, B)
    assert not aligner.identical
    assert aligner.difference == 0
    assert issubclass(TokenizerMismatchError, ValueError)


words = st.text(alphabet="abc theon12+=🙂é\n", max_size=14)


@settings(max_examples=60)
@given(prompt=words, span=words, agrees=st.integers(0, 40))
def test_what_is_accepted_is_a_prefix_of_the_drafts_in_whole_tokens(prompt, span, agrees):
    prefix, drafts = A.encode("^" + prompt), A.encode(span)
    if not drafts:
        return
    read = "^" + prompt + span
    known = read.encode()[: len(("^" + prompt).encode()) + agrees].decode(errors="ignore")
    reader = Reader(B, known)
    result = bridge().judge(reader, prefix, drafts, RULE)
    spelled = token_bytes(A)
    accepted = b"".join(spelled[i] for i in drafts[: result.k])
    assert 0 <= result.k <= len(drafts)
    assert (("^" + prompt).encode() + accepted) == read.encode()[: len(("^" + prompt).encode()) + len(accepted)]
    assert known.encode().startswith(("^" + prompt).encode() + accepted) or result.k == 0
    # what the guider reads spells the same text, as far as characters are whole
    for before, asked in reader.asked:
        theirs = token_bytes(B)
        assert read.encode().startswith(b"".join(theirs[i] for i in [*before, *asked]))


def test_all_is_accepted_where_the_guider_agrees_with_all():
    text = "the cat sat on the mat"
    prefix, drafts = A.encode("the cat"), A.encode(" sat on the mat")
    result = bridge().judge(Reader(B, text), prefix, drafts, RULE)
    assert (result.k, result.rejected_at) == (len(drafts), None)
    result = bridge().judge(Reader(B, "the cat sat on"), prefix, drafts, RULE)
    assert "".join(A.decode([i]) for i in drafts[: result.k]) in (" sat on", " sat")
    assert result.rejected_at == result.k


def test_a_character_over_several_tokens_is_judged_whole():
    """🙂 is four tokens of one byte here: none of them alone is text."""
    emoji = BYTES.encode("🙂")
    assert len(emoji) == 4
    aligner = TokenAligner(BYTES, B)
    for n in (1, 2, 3):
        reader = Reader(B, "hi 🙂")
        assert aligner.judge(reader, BYTES.encode("hi "), emoji[:n], RULE).k == 0
        assert reader.asked == []  # nothing whole is left to judge
    assert aligner.judge(Reader(B, "hi 🙂"), BYTES.encode("hi "), emoji, RULE).k == 4
    assert aligner.judge(Reader(B, "hi 🙂"), BYTES.encode("hi ") + emoji[:2], emoji[2:], RULE).k == 2
    assert aligner.judge(Reader(B, "hi a"), BYTES.encode("hi "), [*BYTES.encode("a"), *emoji[:3]], RULE).k == 1
    # bytes that are no text at all, before: the drafts are still judged
    assert aligner.judge(Reader(B, "�ab"), [emoji[1]], BYTES.encode("ab"), RULE).k == 2


def test_given_tokens_between_drafts_are_not_counted():
    drafts = BYTES.encode("abc")
    aligner = TokenAligner(BYTES, BYTES_OTHER)
    assert not aligner.identical
    result = aligner.judge(Reader(BYTES_OTHER, "xabc"), BYTES.encode("x"), drafts, RULE, judged=[True, False, True])
    assert result.k == 2


BYTES_OTHER = trained(259, ("<stop>", "<pad>", "<x>"))


def test_the_end_is_translated_and_other_special_tokens_are_refused():
    ours, theirs = A.eos_token_id, B.eos_token_id
    aligner = bridge(special={ours: theirs})

    class Ends(Reader):
        def match(self, prefix, drafts, rule, chunk=32, **more):
            text = drafts[:-1] if drafts[-1] == theirs else drafts
            found = super().match(prefix, text, rule, chunk, **more)
            k = found.k + (found.k == len(text) and len(drafts) > len(text))
            return MatchResult(k, None)

    drafts = [*A.encode(" sat"), ours, *A.encode(" more")]
    n = len(A.encode(" sat"))
    assert aligner.judge(Ends(B, "the cat sat"), A.encode("the cat"), drafts, RULE).k == n + 1
    assert aligner.judge(Ends(B, "the cat"), A.encode("the cat"), [ours], RULE).k == 1
    assert bridge().judge(Ends(B, "the cat sat"), A.encode("the cat"), drafts, RULE).k == n
    assert bridge().judge(Ends(B, "the cat"), A.encode("the cat"), [ours], RULE).k == 0


def test_a_special_token_in_the_prompt_is_translated_or_left_out():
    ours, theirs = A.eos_token_id, B.eos_token_id
    prefix = [*A.encode("the"), ours, *A.encode(" cat")]
    reader = Reader(B, "the cat sat")
    bridge(special={ours: [theirs, theirs]}).judge(reader, prefix, A.encode(" sat"), RULE)
    assert reader.asked[0][0] == [*B.encode("the"), theirs, theirs, *B.encode(" cat")]
    reader = Reader(B, "the cat sat")
    bridge().judge(reader, prefix, A.encode(" sat"), RULE)
    assert reader.asked[0][0] == [*B.encode("the"), *B.encode(" cat")]


def test_a_word_level_tokenizer_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="neither byte-level"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_pieces_spell_spaces_and_single_bytes():
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "<0xF0>": 1, "b": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) == [b" a", b"\xf0", b"b"]


def test_a_guided_run_over_the_bridge_ends():
    """A whole run with two vocabularies: every token is the drafter's, and the guider's cache follows the text."""
    from assay.mdlm import DiffusionGenerationConfig, diffusion_generate
    from assay.methods.freecache_guided_diffusion import GuidedScheduler

    from .conftest import Table

    text = " sat on the mat"
    drafts = [*A.encode("the cat"), *A.encode(text)]
    start = len(A.encode("the cat"))
    model = Table(drafts, 301, 300, A.eos_token_id)
    scheduler = GuidedScheduler(Reader(B, "the cat sat on the dog"), aligner=bridge())
    config = DiffusionGenerationConfig(max_new_tokens=len(drafts) - start)
    out = diffusion_generate(model, [drafts[:start]], config, scheduler)
    assert out.sequences[0].tolist() == drafts
    assert 1 < out.steps < len(drafts) - start
    assert isinstance(out.sequences, torch.Tensor)
