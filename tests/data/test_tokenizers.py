"""Text to tokens and back, exactly, or an error that says where and why."""

import json
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer
from jgpt.data import byte_pairs as byte_pairs_module
from jgpt.data.encode import Tokenizer, tokenizer_from_json


@pytest.fixture(scope="module")
def byte_pairs() -> BPETokenizer:
    return BPETokenizer.train(["low lower lowest, new newer newest\n"] * 9, 283)


def same_tokens(one: Tokenizer, other: Tokenizer, text: str) -> bool:
    return one.vocab_size == other.vocab_size and np.array_equal(
        one.encode(text), other.encode(text)
    )


def test_the_lecture_s_tokens_on_tiny_shakespeare(shakespeare):
    tokenizer = CharTokenizer.from_text(shakespeare)
    assert tokenizer.vocab_size == 65
    assert tokenizer.characters[:4] == "\n !$"
    hello = tokenizer.encode("Hello world")
    assert hello.dtype == np.int32
    assert hello.tolist() == [20, 43, 50, 50, 53, 1, 61, 53, 56, 50, 42]
    assert tokenizer.decode(tokenizer.encode(shakespeare)) == shakespeare


@given(st.text(min_size=1), st.data())
def test_characters_round_trip_for_any_text(text, data):
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.vocab_size == len(set(text))
    again = data.draw(st.text(alphabet=sorted(set(text))))
    tokens = tokenizer.encode(again)
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == again
    assert [tokenizer.characters[token] for token in tokens] == list(again)
    restored = tokenizer_from_json(tokenizer.to_json())
    assert same_tokens(tokenizer, restored, again)


@given(st.text())
@example("\ufffd replacement, \0 null, \r\n line end, 🙂")
def test_bytes_round_trip_for_any_text(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)

    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert isinstance(tokenizer_from_json(tokenizer.to_json()), ByteTokenizer)


def test_a_lone_surrogate_has_bytes_but_no_byte_pairs(byte_pairs):
    assert ByteTokenizer().encode("\ud800").tolist() == [0xED, 0xA0, 0x80]
    with pytest.raises(ValueError, match="lone surrogate"):
        byte_pairs.encode("a\ud800")


@given(st.text())
@example("low lower  \n\t lowest<|endoftext|> 🙂\ufffd\0")
def test_byte_pairs_round_trip_for_any_text(byte_pairs, text):
    tokens = byte_pairs.encode(text)
    assert byte_pairs.decode(tokens) == text
    restored = tokenizer_from_json(byte_pairs.to_json())
    assert same_tokens(byte_pairs, restored, text)


def test_an_unknown_character_is_named_with_its_place_and_the_vocabulary():
    tokenizer = CharTokenizer.from_text("hello, world")
    with pytest.raises(ValueError, match="unknown character") as error:
        tokenizer.encode("hell🙂 Earth")
    assert str(error.value) == (
        "unknown character '🙂' at position 4: the vocabulary is the 9 characters ' ,dehlorw'"
    )
    # before the first character of the vocabulary, between, and after the last
    for unknown in ("\n", "f", "z"):
        with pytest.raises(ValueError, match="at position 1"):
            tokenizer.encode("d" + unknown)


def from_hf(byte_pairs, **changes) -> BPETokenizer:
    """The tokenizer of a `tokenizer.json` with other parts."""
    values = json.loads(byte_pairs.to_json())["tokenizer"]
    tokenizer = tokenizer_from_json(json.dumps(values | changes))
    assert isinstance(tokenizer, BPETokenizer)
    return tokenizer


def model_of(byte_pairs, **changes):
    return json.loads(byte_pairs.to_json())["tokenizer"]["model"] | changes


def test_a_text_is_encoded_whole_and_always_alike(byte_pairs):
    text = "low lower lowest, new newer newest\n" * 3
    plain = byte_pairs.encode(text)
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    filled = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    filled |= {"pad_token": "x", "strategy": {"Fixed": 99}}
    model = model_of(byte_pairs, dropout=0.9)
    tokenizer = from_hf(byte_pairs, truncation=cut, padding=filled, model=model)

    assert len(plain) == 24
    for _ in range(3):
        assert np.array_equal(tokenizer.encode(text), plain)
    assert tokenizer.to_json() == byte_pairs.to_json()


# --- tiktoken ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(byte_pairs, data_directory) -> list[BPETokenizer]:
    """Tokenizers whose long texts tiktoken encodes: trained, with an end of text, and GPT-2's."""
    end = TOKEN | {"id": 999, "content": "<|endoftext|>"}
    code = Path(json.__file__).read_text()
    trained = BPETokenizer.train([code, "a aa aaa aaaa 🙂🙂 \t\t  \n\n '' ..."] * 3, 700)
    gpt2 = BPETokenizer.from_gpt2(data_directory / "gpt2-bpe")
    return [trained, from_hf(byte_pairs, added_tokens=[end]), gpt2]


WORDS = ["a", "aa", "'s", "'", "'re", "ll", "A", "é", "e\u0301", "ß", "中", "\u0661", "1", "23"]
PIECES = st.sampled_from([*WORDS, "½", "²", ".", "..", "__", "🙂", "\u200d"])
SPACES = st.sampled_from(["", " ", "  ", "\n", "\r\n", "\t", "\xa0", "\u2028", "\x85", "\x1c"])
PARTS = st.one_of(PIECES, SPACES, st.text(max_size=5), st.just("<|endoftext|>"))


@given(st.lists(PARTS, max_size=40).map("".join))
@example("<|endoftext|><|endoftext|> \n <|endoftext|")
@example("a" * 999 + " " * 999 + "x")
def test_tiktoken_gives_the_same_tokens(quick, text):
    for tokenizer in quick:
        assert tokenizer.fast is not None
        with mock.patch.object(byte_pairs_module, "LONG_TEXT", 0):
            fast = tokenizer.encode(text).tolist()
        assert fast == tokenizer._backend.encode(text).ids


def test_long_words_are_learnt_from_in_parts():
    """Otherwise this takes minutes, since a merge moves what follows it."""
    word = "".join("acgt"[(n * n + n // 7) % 4] for n in range(200_000))
    tokenizer = BPETokenizer.train([word], 300)

    assert tokenizer.vocab_size == 300
    assert tokenizer.fast is not None


# --- transformers' GPT-2 -------------------------------------------------------------------------

ALPHABETS = [
    range(0x20, 0x7F),
    range(0x3000),
    [*range(0xD800), *range(0xE000, sys.maxunicode + 1)],
    [*b" \n\t'abcdeABC0123.,!"],
]


# of transformers 5.3 with tokenizers 0.22
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")
def test_gpt2_s_tokens_are_those_of_transformers_before_and_after_saving(data_directory, tmp_path):
    transformers = pytest.importorskip("transformers")
    files = data_directory / "gpt2-bpe"
    special = "one<|endoftext|>\n two<|endoftext|><|endoftext"
    contractions = "Ünïcode, and it's <|endoftext|> x"
    texts = [special, contractions]
    draw = random.Random(0)
    for alphabet in ALPHABETS * 500:
        points = draw.choices(alphabet, k=draw.randrange(40))
        texts.append("".join(map(chr, points)))
    theirs = transformers.GPT2Tokenizer(str(files / "encoder.json"), str(files / "vocab.bpe"))

    ours = BPETokenizer.from_gpt2(files)
    ours.to_hf().model.save(str(tmp_path))
    saved = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    again = tokenizer_from_json(ours.to_json())

    for text in texts:
        tokens = ours.encode(text)
        assert tokens.tolist() == theirs.encode(text), repr(text)
        assert ours.decode(tokens) == text
    assert saved.encode(contractions) == ours.encode(contractions).tolist()
    assert ours.encode(special).tolist().count(50256) == 2
    assert same_tokens(ours, again, special)


def test_merges_that_tiktoken_reads_otherwise_are_left_to_tokenizers(byte_pairs):
    model = model_of(byte_pairs)
    vocab = model["vocab"]
    merges = model["merges"]
    first, second = ("".join(pair) for pair in merges[:2])
    twice = {"vocab": vocab | {"Ġq": 998, "qx": 999, "Ġqx": 1000}}

    for changes in (
        {"ignore_merges": True},
        {"vocab": vocab | {first: vocab[second], second: vocab[first]}},  # in another order
        {"vocab": {word: token for word, token in vocab.items() if word != "!"}},
        {"vocab": vocab | {"zzz": 999}},  # of no merge
        twice | {"merges": [*merges, ["Ġ", "q"], ["q", "x"], ["Ġ", "qx"]]},
    ):
        assert from_hf(byte_pairs, model=model | changes).fast is None


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PIECE = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "pair": [PIECE], "special_tokens": {}}


@pytest.mark.slow
def test_what_tiktoken_rejects_is_encoded_still(quick):
    """Its regular expression takes a run of spaces onto a stack."""
    spaces = " " * 2_000_000 + "x"
    with pytest.raises(ValueError, match="Max stack size"):
        quick[2].fast.encode_to_numpy(spaces)
    assert len(quick[2].encode(spaces)) == 2_000_000
    with pytest.raises(ValueError, match="lone surrogate"):
        quick[2].encode("a" * (1 << 16) + "\ud800")


TOKEN = {"special": True} | dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": BYTES},
        {"normalizer": {"type": "NFC"}},
        {"post_processor": TEMPLATE | {"single": [PIECE] * 2}},
        {"added_tokens": [TOKEN | {"id": 999, "content": "<a>", "rstrip": True}]},
        {"added_tokens": [TOKEN | {"id": n, "content": n * "<"} for n in (998, 999)]},
    ],
    ids=str,
)
def test_tokens_that_might_differ_are_left_to_tokenizers(byte_pairs, changes):
    assert from_hf(byte_pairs).fast is not None
    assert from_hf(byte_pairs, **changes).fast is None
