"""Text as it comes: whole characters, and nothing of a stop string."""

import jax
import numpy as np
import pytest
import tokenizers as tk
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from jgpt import BigramLM, BPETokenizer, ByteTokenizer, CharTokenizer, generate_text
from jgpt.generation.text import _Detokenizer, _texts, stream_text

KEY = jax.random.key(3)
LETTERS = CharTokenizer("\nabcdef")


@pytest.fixture(scope="module")
def model():
    """Says the alphabet over and over: after each character the next one, after f a new line."""
    model = BigramLM(7, rngs=nnx.Rngs(0))
    following = np.roll(np.eye(7, dtype=np.float32), 1, axis=1)
    # a logit 50 above the others is drawn whatever the key
    model.table.embedding[...] = 50 * following
    return model


@given(st.binary(max_size=30), st.integers(1, 4))
@example("a🙂é".encode(), 1)
@example(b"\xed\xa0\x80\xff", 3)
def test_a_stream_of_any_bytes_reads_as_the_whole(data, size):
    pieces = cut(data, size)

    said = list(decoded(pieces))

    assert "".join(said) == ByteTokenizer().decode(list(data))


def decoded(pieces, stop=()):
    """One sequence's text as its bytes arrive."""
    writer = _Detokenizer(ByteTokenizer(), stop)
    rows = (piece[None] for piece in pieces)
    for (text,) in _texts((writer,), rows):
        if text:
            yield text


def cut(tokens, size):
    """Tokens, or bytes as tokens, in pieces of one size."""
    starts = range(0, len(tokens), size)
    return [np.array(list(tokens[start : start + size]), np.int32) for start in starts]


@given(
    st.text("ab\n", max_size=20),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple),
    st.integers(1, 5),
)
@example("aab", ("ab",), 1)
@example("aaab", ("aab", "b"), 2)
@example("ab", ("abb", "b"), 1)
@example("\naa", ("a", "\naa"), 1)
@example("\naa", ("a", "\naa"), 3)
def test_a_text_ends_before_the_stop_string_that_is_complete_first(text, stop, size):
    expected = text
    for complete in range(1, len(text) + 1):
        ending = [one for one in stop if text[:complete].endswith(one)]
        if ending:
            longest = max(len(one) for one in ending)
            expected = text[: complete - longest]
            break
    pieces = cut(text.encode(), size)

    said = ""
    for piece in decoded(pieces, stop):
        said += piece
        assert expected.startswith(said)  # nothing is ever taken back

    assert said == expected


def test_prompts_are_continued_side_by_side(model):
    prompts = ("a", "\nabcd", "")

    greedy = generate_text(model, LETTERS, prompts, 9, key=KEY, temperature=0.0)
    drawn = generate_text(model, LETTERS, prompts, 9, key=KEY)

    assert greedy == ("bcdef\nabc", "ef\nabcdef", "abcdef\nab")
    assert drawn == greedy


@pytest.mark.parametrize(
    ("prompts", "count", "stop", "texts"),
    [
        (("a", "d"), 99, ("e", "\na"), ("bcd", "")),
        (("a", "d"), 4, ("ef\na", "x"), ("bcde", "")),
        # the first one to appear, in whatever order they are listed
        (("a",), 9, ("e", "c"), ("b",)),
        # what begins in the prompt is none
        (("ab",), 9, ("bc",), ("cdef\na",)),
    ],
)
def test_each_text_ends_at_a_stop_string_of_its_own(model, prompts, count, stop, texts):
    found = generate_text(model, LETTERS, prompts, count, key=KEY, stop=stop)

    assert found == texts


def test_a_stream_says_what_the_whole_says(model):
    prompts = ("a", "d")
    never = ("f\nabcdef\nb",)  # which is begun again and again

    pieces = list(stream_text(model, LETTERS, prompts, 70, key=KEY, stop=never))
    whole = generate_text(model, LETTERS, prompts, 70, key=KEY, stop=never)

    first = "".join(texts[0] for texts in pieces)
    second = "".join(texts[1] for texts in pieces)
    assert whole == (first, second)
    assert len(first) == 70
    assert len(second) == 70


# --- what a decoder makes of tokens depends on those before them ----------------------------------


def spaced() -> BPETokenizer:
    """Llama 2's kind: a space before each word, which the decoder strips of the first."""
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "▁", "▁hello", "▁world", *"helowrd", *all_bytes]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    model = tk.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    backend = tk.Tokenizer(model)
    replace = tk.decoders.Replace("▁", " ")
    strip = tk.decoders.Strip(" ", 1, 0)
    parts = [replace, tk.decoders.ByteFallback(), tk.decoders.Fuse(), strip]
    backend.decoder = tk.decoders.Sequence(parts)
    return BPETokenizer(backend)


FIRST_BYTE = 11  # after four pieces and seven letters


def joined(text: str) -> list[int]:
    """Words and bytes as the tokens of `spaced`."""
    words = {"hello": 2, "world": 3, "_": 1}
    tokens = []
    for word in text.split():
        if word in words:
            tokens.append(words[word])
        else:
            tokens += [FIRST_BYTE + byte for byte in word.encode()]
    return tokens


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("context", "text"),
    [
        ("", "hello world world"),
        ("hello _", "world _ _ world"),
        ("hello", "你好 world é 🙂🙂 hello"),
    ],
)
def test_a_stream_says_what_all_tokens_say_together(context, text, size):
    tokenizer = spaced()
    before = joined(context)
    after = joined(text)
    writer = _Detokenizer(tokenizer, (), tuple(before))

    said = ""
    for piece in cut(after, size):
        said += writer.write(piece)
    at_the_end = writer.write(np.zeros(0, np.int32), final=True)

    assert tokenizer.decode(before) + said == tokenizer.decode(before + after)
    assert at_the_end == ""  # nothing waits for it


def test_only_what_may_become_a_stop_string_is_held_back():
    pieces = cut(b"xabxabc", 1)
    wide = cut("né🙂".encode(), 1)

    assert list(decoded(pieces, ("abc",))) == ["x", "abx"]
    assert list(decoded(pieces[:-1], ("abc",))) == ["x", "abx", "ab"]
    assert list(decoded(wide, ("é!",))) == ["n", "é🙂"]
