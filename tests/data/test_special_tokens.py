"""Tokens that begin a text, where a tokenizer adds them, as Llama's does."""

import json
from typing import Any

import numpy as np
import pytest
import tokenizers as tk

from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer, DataConfig
from jgpt.data.dataset import load_dataset
from jgpt.data.encode import encode_each
from jgpt.generation.chat import END, START, Chat
from jgpt.interop.text_files import read_folder_tokenizer
from tests.generation.test_chat import Model

TEXT = "hello world, hello word: the world is low and the word is old\n" * 9


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


def mistral() -> Any:
    """Metaspace as a pre-tokenizer: a space before the first word alone."""
    backend = tk.Tokenizer(tk.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = tk.pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = tk.decoders.Metaspace(prepend_scheme="first")
    backend = trained(backend, special_tokens=["<unk>", "<s>", "</s>"])
    return with_template(backend, begin="<s>")


TEXTS = ["hello world", "", " hello\n\nword", "the 12345 wörld 你好", "a" * 70_000]


@pytest.fixture(scope="module", params=[llama2, llama3, mistral])
def backend(request) -> Any:
    return request.param()


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


def test_a_text_begins_with_one_token_however_it_is_written(tokenizer):
    (token,) = tokenizer.begin
    begin = tokenizer.decode([token])
    text = f"{begin}hello"  # as a chat template writes it

    written = tokenizer.encode(text).tolist()

    assert begin in ("<s>", "<|begin_of_text|>")
    assert tokenizer.encode("").tolist() == [token]
    assert tokenizer.encode(begin).tolist() == [token]
    assert written == [token, *tokenizer.encode_part(text).tolist()[1:]]
    assert written.count(token) == 1
    # one more is put before a text that has them elsewhere
    assert tokenizer.encode(f"hello{begin}{begin}").tolist().count(token) == 3
    for other in (CharTokenizer("\n a"), ByteTokenizer(), BPETokenizer.train([TEXT], 300)):
        assert other.begin == ()


def test_documents_are_told_apart_by_them(tokenizer, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "hello world"}\n{"text": "the word"}\n' * 30)
    config = DataConfig((str(path),))
    (begin,) = tokenizer.begin
    first_document = tokenizer.encode("hello world").tolist()

    dataset = load_dataset(config, 5, tokenizer=tokenizer)

    tokens = np.concatenate([dataset.train, dataset.validation]).tolist()
    assert tokens[0] == begin
    assert tokens.count(begin) == 61  # the last one begins no document
    assert tokens[: len(first_document) + 1] == [*first_document, begin]


def with_tokens(backend: Any, *contents: str, **fields: bool) -> Any:
    backend = tk.Tokenizer.from_str(backend.to_str())
    tokens = [tk.AddedToken(content, normalized=False, **fields) for content in contents]
    backend.add_special_tokens(tokens)
    return backend


def test_the_config_beside_a_tokenizer_changes_its_tokens_as_in_transformers(tmp_path):
    """There the token takes the spaces before it, and not those after it."""
    transformers = pytest.importorskip("transformers")
    backend = with_tokens(llama3(), "<A>", rstrip=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    token = {"content": "<A>", "special": True, "lstrip": True}
    token |= dict.fromkeys(("single_word", "rstrip", "normalized"), False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<A>",
        "added_tokens_decoder": {str(backend.token_to_id("<A>")): token},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = read_folder_tokenizer(tmp_path, 500)
    text = "hello \n<A> \nworld <B> <C> <D> \nthe"

    assert tokenizer.encode(text).tolist() == theirs(text).input_ids


def test_of_the_parts_of_a_text_only_the_first_one_begins_it(tokenizer):
    encoded = encode_each(tokenizer, ["hello", " world"], np.dtype(np.uint16))
    data = b"".join(of_part for _, of_part in encoded)

    assert np.frombuffer(data, np.uint16).tolist() == tokenizer.encode("hello world").tolist()


def test_a_conversation_has_the_tokens_that_transformers_gives_its_template(backend):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")  # with which transformers writes a template
    backend = with_tokens(backend, START, END)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    theirs.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = BPETokenizer.from_hf(json.loads(backend.to_str()))
    messages = [
        {"role": "system", "content": " hello \n"},
        {"role": "user", "content": "\n\nthe world\u3000"},
        {"role": "assistant", "content": "wörld\x1c\t"},
        {"role": "user", "content": "12345 "},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    model: Any = Model()
    model.block_size = 500
    chat = Chat(model, tokenizer, " hello \n")
    turns = [chat._pieces(message["role"], message["content"]) for message in messages]

    assert chat._tokens(turns) == expected
    assert expected.count(backend.token_to_id(START)) == 5
