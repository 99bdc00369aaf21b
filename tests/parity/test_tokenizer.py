"""GPT-2's byte-pairs: transformers' tokens, and the text again."""

import random
import sys

import pytest
import transformers

from jgpt.data.tokenizers import BPETokenizer, tokenizer_from_json

# of transformers 5.3 with tokenizers 0.22
pytestmark = pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")


@pytest.fixture(scope="module")
def pair(data_directory):
    files = data_directory / "gpt2-bpe"
    reference = transformers.GPT2Tokenizer(str(files / "encoder.json"), str(files / "vocab.bpe"))
    return BPETokenizer.from_gpt2(files), reference


def assert_same(pair, text):
    mine, reference = pair
    tokens = mine.encode(text)
    assert tokens.tolist() == reference.encode(text), repr(text)
    assert mine.decode(tokens) == text


def test_random_unicode(pair):
    source = random.Random(0)
    alphabets = [
        range(0x20, 0x7F),
        range(0x100),
        range(0x3000),
        [*range(0xD800), *range(0xE000, sys.maxunicode + 1)],
        [*b" \n\t'abcdeABC0123.,!"],
    ]
    for _ in range(10_000):
        alphabet, length = source.choice(alphabets), source.randrange(40)
        assert_same(pair, "".join(map(chr, source.choices(alphabet, k=length))))


def test_the_end_of_text_is_one_token_and_survives_json(pair):
    text = "one<|endoftext|>\n two<|endoftext|><|endoftext"
    assert_same(pair, text)
    assert pair[0].encode(text).tolist().count(50256) == 2
    again = tokenizer_from_json(pair[0].to_json())
    assert again.encode(text).tolist() == pair[0].encode(text).tolist()


def test_saved_files_are_read_by_both(pair, tmp_path):
    pair[0].save_gpt2(tmp_path)
    reference = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    assert_same((BPETokenizer.from_gpt2(tmp_path), reference), "Ünïcode, and it's <|endoftext|> x")
