"""Tokens that begin a text, where a tokenizer adds them: Llama's, and of runs from before."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as tk
from flax import nnx

import jgpt
from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer, DataConfig
from jgpt.data.dataset import load_dataset
from jgpt.data.tokenizers import (
    encode_each,
    is_same_vocabulary,
    text_of_token,
    tokenizer_from_json,
)
from jgpt.generation.chat import Chat
from jgpt.generation.text import default_prompt, generate_text
from jgpt.pictures.look import encode_text
from tests.generation.test_chat import with_chat_tokens

TEXT = "hello world, hello word: the world is low and the word is old\n" * 9
BOS = {"llama2": "<s>", "llama2_first": "<s>", "llama3": "<|begin_of_text|>"}


def trained(backend: Any, **options: Any) -> Any:
    trainer = tk.trainers.BpeTrainer(vocab_size=320, show_progress=False, **options)
    backend.train_from_iterator([TEXT], trainer)
    return backend


def with_template(backend: Any, *others: Any, begin: str) -> Any:
    special = [(begin, backend.token_to_id(begin))]
    template = tk.processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    backend.post_processor = tk.processors.Sequence([*others, template]) if others else template
    return backend


def llama2() -> Any:
    """Metaspace as a normaliser, bytes for what is unknown, and a decoder that strips a space."""
    backend = tk.Tokenizer(tk.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = [tk.normalizers.Prepend("▁"), tk.normalizers.Replace(" ", "▁")]
    backend.normalizer = tk.normalizers.Sequence(spaces)
    replace = tk.decoders.Replace("▁", " ")
    strip = tk.decoders.Strip(" ", 1, 0)
    parts = [replace, tk.decoders.ByteFallback(), tk.decoders.Fuse(), strip]
    backend.decoder = tk.decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # the trainer takes the bytes as tokens alone: only three of these are special
    backend.pre_tokenizer = tk.pre_tokenizers.Split("▁", "merged_with_next")  # learn words
    backend = trained(backend, special_tokens=special)
    values = json.loads(backend.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    values["pre_tokenizer"] = None
    return with_template(tk.Tokenizer.from_str(json.dumps(values)), begin="<s>")


def llama2_first() -> Any:
    """Metaspace as newer conversions have it."""
    backend = tk.Tokenizer(tk.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = tk.pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = tk.decoders.Metaspace(prepend_scheme="first")
    backend = trained(backend, special_tokens=["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = tk.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return with_template(backend, begin="<s>")


def llama3() -> Any:
    """Byte-level pairs, and a sequence of post-processors."""
    backend = tk.Tokenizer(tk.models.BPE())
    words = tk.pre_tokenizers.Split(tk.Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")
    bytes_ = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tk.pre_tokenizers.Sequence([words, bytes_])
    backend.decoder = tk.decoders.ByteLevel()
    alphabet = tk.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    backend = trained(backend, special_tokens=special, initial_alphabet=alphabet)
    trim = tk.processors.ByteLevel(trim_offsets=True)
    return with_template(backend, trim, begin="<|begin_of_text|>")


BACKENDS = {"llama2": llama2, "llama2_first": llama2_first, "llama3": llama3}
TEXTS = ["hello world", "", " hello\n\nword", "the 12345 wörld 你好", "a" * 70_000]


@pytest.fixture(scope="module", params=BACKENDS)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def backend(family) -> Any:
    return BACKENDS[family]()


@pytest.fixture(scope="module")
def tokenizer(backend) -> BPETokenizer:
    return BPETokenizer.from_hf(json.loads(backend.to_str()))


def test_a_text_has_the_tokens_that_transformers_gives_it(backend, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in TEXTS:
        expected = theirs(text).input_ids
        assert tokenizer.encode(text).tolist() == expected
        assert tokenizer.encode_part(text).tolist() == expected[1:]  # and not without


def test_a_text_begins_with_one_token_however_it_is_written(family, tokenizer):
    begin = BOS[family]
    (token,) = tokenizer.begin
    assert tokenizer.decode([token]) == begin
    assert tokenizer.encode("").tolist() == [token]
    assert tokenizer.encode(begin).tolist() == [token]
    written = tokenizer.encode(f"{begin}hello").tolist()  # as a chat template writes it
    assert written == [token, *tokenizer.encode_part(f"{begin}hello").tolist()[1:]]
    assert written.count(token) == 1
    assert tokenizer.encode(f"hello{begin}{begin}").tolist().count(token) == 3
    for other in (CharTokenizer("\n a"), ByteTokenizer(), BPETokenizer.train([TEXT], 300)):
        assert other.begin == ()


def test_a_post_processor_of_another_kind_is_read_too():
    backend = llama2_first()
    sep, cls = ("</s>", 2), ("<s>", 1)
    backend.post_processor = tk.processors.RobertaProcessing(sep, cls, add_prefix_space=False)
    tokenizer = BPETokenizer.from_hf(json.loads(backend.to_str()))
    assert tokenizer.begin == (1,)
    assert tokenizer.encode("hello").tolist() == backend.encode("hello").ids
    backend.post_processor = tk.processors.ByteLevel()
    assert BPETokenizer.from_hf(json.loads(backend.to_str())).begin == ()


def test_a_run_from_before_goes_on_without_them(tokenizer, backend):
    """Its file has the post-processor, but not the field that says whether it was heeded."""
    new = json.loads(tokenizer.to_json())
    assert new["adds_special_tokens"] is True
    again = tokenizer_from_json(tokenizer.to_json())
    assert again.encode("hello").tolist() == tokenizer.encode("hello").tolist()
    assert again.to_json() == tokenizer.to_json()
    written = f'{{"type": "bpe", "tokenizer": {backend.to_str()}}}'  # as it was until now
    earlier = tokenizer_from_json(written)
    assert earlier.begin == ()
    assert earlier.encode("hello").tolist() == tokenizer.encode_part("hello").tolist()
    assert json.loads(earlier.to_json()) == json.loads(written)
    assert is_same_vocabulary(earlier, tokenizer)
    assert not is_same_vocabulary(earlier, BPETokenizer.train([TEXT], 300))


def test_prompts_begin_with_them_and_are_continued_as_text(family, tokenizer):
    model = jgpt.BigramLM(tokenizer.vocab_size, rngs=nnx.Rngs(0))
    world = int(tokenizer.encode("hello world")[-1])
    assert default_prompt(tokenizer).tolist() == list(tokenizer.begin)
    assert encode_text(tokenizer, "hello").tolist() == tokenizer.encode("hello").tolist()
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size), np.float32)
    table[:, world] = 9  # always says the same token
    model.table.embedding[...] = jnp.asarray(table)
    said = generate_text(model, tokenizer, ("hello", ""), 2, temperature=0.0)
    # the first word of a text has no space before it, but for Llama 3, where it is in the token
    assert said == (" world world", " world world" if family == "llama3" else "world world")


def test_documents_are_told_apart_by_them(family, tokenizer, tmp_path):
    (tmp_path / "some.jsonl").write_text('{"text": "hello world"}\n{"text": "the word"}\n' * 30)
    config = DataConfig((str(tmp_path / "some.jsonl"),))
    dataset = load_dataset(config, 5, tokenizer=tokenizer)
    tokens = np.concatenate([dataset.train, dataset.validation])
    (begin,) = tokenizer.begin
    assert tokens[0] == begin
    assert (tokens == begin).sum() == 61  # the last one begins no document
    first = tokenizer.encode("hello world").tolist()
    assert tokens[: len(first) + 1].tolist() == [*first, begin]
    earlier = BPETokenizer(tokenizer._backend, adds_special_tokens=False)
    assert begin not in load_dataset(config, 5, tokenizer=earlier).train
    # of the parts of a text only the first one begins it
    parts = encode_each(tokenizer, ["hello", " world"], np.dtype(np.uint16))
    joined = np.frombuffer(b"".join(part for _, part in parts), np.uint16)
    assert joined.tolist() == tokenizer.encode("hello world").tolist()


def test_a_chat_has_none(tokenizer):
    """ChatML has no token that begins a text: transformers adds none to a template's tokens."""
    chatty = with_chat_tokens(tokenizer)
    assert chatty.begin == tokenizer.begin

    class Model:
        block_size = 64

    chat = Chat(Model(), chatty, rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    assert chatty.begin[0] not in chat._turn("user", "hello world")


@pytest.mark.parametrize("content", ["éé", "<é>", "café", "ÿ¡", "naïve token", "<ascii>", "你"])
def test_an_added_token_is_decoded_as_its_text(content):
    """The byte-level alphabet has letters such as é, which stand for bytes; here they do not."""
    tokenizer = BPETokenizer.train([TEXT], 280)
    values = json.loads(tokenizer.to_json())["tokenizer"]
    how = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    values["added_tokens"] = [{"id": tokenizer.vocab_size, "content": content, **how}]
    tokenizer = BPETokenizer.from_hf(values)
    text = f"hello é{content} {content}{content}\nwörld"
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size - 1 in tokens
    assert tokenizer.decode(tokens) == text
    assert text_of_token(tokenizer, tokenizer.vocab_size - 1) == content


def test_a_token_on_the_page_has_the_space_that_it_begins_with(backend, tokenizer):
    word = tokenizer.encode_part("the world")[-1:].tolist()
    assert text_of_token(tokenizer, word[0]) == " world"
    letters = CharTokenizer("\n a")
    assert [text_of_token(letters, token) for token in range(3)] == ["\n", " ", "a"]
    assert [text_of_token(ByteTokenizer(), token) for token in (97, 0xC3)] == ["a", "\ufffd"]
