"""The byte-level vocabulary, as numbers and as a tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.lm._bytes import END, byte_llama_config, byte_tokenizer, byte_tokens


def test_a_byte_is_its_value_plus_one_and_zero_ends_a_text():
    assert byte_tokens(["ab", "", "é"]).tolist() == [98, 99, 0, 0, 196, 170, 0]
    assert byte_tokens([]).tolist() == []


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("transformers")
    return byte_tokenizer()


@settings(max_examples=50)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_tokenizer_says_the_same_and_back(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [*ids, END] == byte_tokens([text]).tolist()
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_configuration():
    config = byte_llama_config(num_hidden_layers=2)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (257, 64, 2)
    assert not config.tie_word_embeddings
