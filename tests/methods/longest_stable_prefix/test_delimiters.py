"""Which tokens are delimiters, where words begin, and that no character is cut in two."""

import pytest
import torch

from assay._errors import InputError
from assay.lm._bytes import VOCABULARY, byte_tokenizer
from assay.mdlm import diffusion_generate
from assay.methods.longest_stable_prefix import LongestStablePrefix, delimiter_mask
from assay.methods.longest_stable_prefix._delimiters import Characters, token_bytes, word_starts

from .scripted import Scripted, config, sharp

PIECES = ["a", ".", " word", "end. ", ";", "\n", "foo(", ")", " }", ":", "。", "人", "，", '"', "  ", "", "x\ny", "?!"]


def chosen(profile):
    return {piece for piece, is_delim in zip(PIECES, delimiter_mask(PIECES, profile).tolist()) if is_delim}


def test_profiles():
    text = {".", "end. ", ";", "\n", ")", " }", ":", "。", "，", '"', "x\ny", "?!"}
    assert chosen("text") == text
    assert chosen("code") == {";", "\n", ")", " }", ":", "x\ny"}
    assert chosen("cjk") == {"。", "，", "\n", "x\ny"}
    assert chosen(str.isspace) == {"\n", "  "}
    assert chosen([0, 2]) == {"a", " word"}


def test_unknown_profiles_and_ids_are_refused():
    with pytest.raises(Exception, match="'prose'"):  # the signature's Literal is checked first here
        delimiter_mask(PIECES, "prose")
    with pytest.raises(InputError, match="id 18 lies outside the vocabulary of 18"):
        delimiter_mask(PIECES, [3, 18])
    with pytest.raises(InputError, match="id True is not a whole number"):
        delimiter_mask(PIECES, [True] * 18)  # a mask, not ids


def test_a_tokenizers_name_is_not_taken_for_its_vocabulary():
    with pytest.raises(InputError, match="tokenizer is the text 'LLaDA-8B-Instruct'"):
        LongestStablePrefix(tokenizer="LLaDA-8B-Instruct")


def test_a_byte_level_tokenizer_reads_as_its_bytes():
    tokenizer = byte_tokenizer()
    pieces = token_bytes(tokenizer)
    assert pieces == [b"", *(bytes([b]) for b in range(256))]
    mask = delimiter_mask(tokenizer)
    assert mask[tokenizer.eos_token_id]
    assert mask[ord(".") + 1]
    assert mask[ord("\n") + 1]
    assert not mask[ord("a") + 1]
    assert not mask[129:].any()  # parts of characters


def test_sentencepiece_marks_and_byte_tokens():
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(
        models.BPE(vocab={"<unk>": 0, "</s>": 1, "<0x0A>": 2, "<0xE4>": 3, "▁the": 4, "▁.": 5, "ing": 6}, merges=[])
    )
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_tokens([AddedToken("▁plain", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    assert token_bytes(tokenizer)[2:] == [b"\n", b"\xe4", b" the", b" .", b"ing", "▁plain".encode()]
    assert delimiter_mask(tokenizer).tolist() == [False, True, True, False, False, True, False, False]
    assert word_starts(tokenizer)[2:7].tolist() == [True, False, True, True, False]


def test_words_start_at_spaces_marks_and_cjk_characters():
    starts = {piece for piece, start in zip(PIECES, word_starts(PIECES).tolist()) if start}
    assert starts == set(PIECES) - {"a", "end. ", "foo(", "x\ny"}


@pytest.mark.parametrize("text", ["aé", "€uro", "a😀b😀", "é€😀", "plain"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_text_is_whole_exactly_where_its_bytes_decode(text, width):
    data = text.encode()
    # pieces of so many bytes, however they cut the characters
    parts = [data[i : i + width] for i in range(0, len(data), width)]

    class Pieces:
        all_special_ids = ()
        added_tokens_decoder = {}  # noqa: RUF012

        def __len__(self):
            return len(parts)

        def convert_ids_to_tokens(self, ids):
            return [f"<0x{parts[i][0]:02X}>" for i in ids]

    if width == 1:
        characters = Characters(Pieces())
    else:
        characters = Characters.__new__(Characters)
        from assay.methods.longest_stable_prefix._delimiters import _character_state

        states = [_character_state(part) for part in parts]
        characters._missing = torch.tensor([s[0] for s in states])
        characters._adds = torch.tensor([s[1] for s in states])

    def decodes(prefix):
        try:
            prefix.decode()
        except UnicodeDecodeError:
            return False
        return True

    whole = characters.whole(torch.arange(len(parts))[None])[0].tolist()
    assert whole == [decodes(b"".join(parts[: i + 1])) for i in range(len(parts))]


@pytest.mark.parametrize("minimum", [1, 3])
def test_no_block_ends_inside_a_character(minimum):
    tokenizer = byte_tokenizer()
    data = ("ab😀é€" * 8).encode()

    def script(x, call):
        tokens = torch.tensor([0, *data]) + 1
        return sharp(tokens[: x.shape[1]].expand_as(x), torch.linspace(9, 1, x.shape[1]), VOCABULARY + 1)

    def run(**settings):
        model = Scripted(script, vocab_size=VOCABULARY + 1, mask_token_id=VOCABULARY, eos_token_id=0, pad_token_id=0)
        scheduler = LongestStablePrefix(0.05, 0.2, minimum, lookback=0, delimiters=None, stability=0, **settings)
        out = diffusion_generate(model, torch.tensor([[5]]), config(len(data), eos_policy="none"), scheduler)
        return out.stats["commit_lengths"][0], out.stats["reasons"][0]

    def cut(lengths):
        ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
        return [end for end in ends if data[:end].decode(errors="ignore").encode() != data[:end]]

    lengths, reasons = run(tokenizer=tokenizer)
    assert "character" in reasons
    # while blocks may hold four tokens no character is cut; towards the end they hold fewer
    whole_until = sum(n for n in lengths[:5])
    assert [end for end in cut(lengths) if end <= whole_until] == []
    assert cut(run()[0]) != []
    assert len(cut(lengths)) < len(cut(run()[0]))


def test_without_a_delimiter_a_word_is_not_cut():
    pieces = ["<e>", " re", "mark", "able", ".", *"bcdefgh"] + ["?"] * 28
    pattern = torch.tensor([1, 2, 3] * 8)

    def script(x, call):
        return sharp(torch.cat([torch.tensor([1]), pattern]).expand_as(x), torch.linspace(9, 1, x.shape[1]))

    def run(**settings):
        scheduler = LongestStablePrefix(0.25, 0.5, lookback=4, stability=0, tokenizer=pieces, **settings)
        out = diffusion_generate(Scripted(script), torch.tensor([[1]]), config(24, eos_policy="none"), scheduler)
        return out.stats["commit_lengths"][0]

    assert run()[1:3] == [6, 3]
    lengths = run(word_safe=True)
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    assert all(end % 3 == 0 for end in ends[:3])


@pytest.mark.slow
def test_smollm2():
    from transformers import AutoTokenizer

    from assay.data import resolve
    from assay.lm._gguf import converted

    try:
        path = resolve("smollm2-135m-instruct", "language model").path
    except (OSError, ValueError) as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(path if path.is_dir() else converted(path), local_files_only=True)
    mask = delimiter_mask(tokenizer)
    for text, expected in ((".", True), (";", True), ("\n", True), ("a", False)):
        (token,) = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert mask[token] == expected
    emoji = torch.tensor([tokenizer("🦜", add_special_tokens=False)["input_ids"]])
    assert emoji.shape[1] > 1
    whole = Characters(tokenizer).whole(emoji)[0].tolist()
    assert whole == [False] * (emoji.shape[1] - 1) + [True]
