"""The files about text in a Hugging Face folder: tokenizer, special tokens, chat template,
generation.

An import keeps these files unchanged in the run, and an export writes them again, so that
transformers stops, pads and fills the template as before.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jgpt.data.byte_pairs import END_OF_TEXT, BPETokenizer
from jgpt.data.encode import Tokenizer, read_tokenizer
from jgpt.files import prefix_errors, read_json

HF_CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
OF_THE_MODEL = (HF_CONFIG, GENERATION)
OF_THE_TOKENIZER = (
    TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE, "chat_template.json",
)  # fmt: skip
NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
MORE_NAMED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_WRITE_AGAIN = "write it with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"

TextFiles = dict[str, bytes]
"""The content of files by their path in the folder."""


def read_text_files(model_folder: Path, tokenizer_folder: Path) -> TextFiles:
    """Read the files about text of a model, and those of its tokenizer.

    Raises ValueError naming a file that should be JSON and is not.
    """
    paths = {name: model_folder / name for name in OF_THE_MODEL}
    for name in OF_THE_TOKENIZER:
        paths[name] = tokenizer_folder / name
    files = {}
    for name, path in paths.items():
        if not path.is_file():
            continue
        if path.suffix == ".json":
            with prefix_errors(path):
                read_json(path)
        files[name] = path.read_bytes()
    return files


def parse_text_file(files: TextFiles, name: str) -> dict[str, Any]:
    """Return the object in one of the JSON files, or an empty one if the folder has no such
    file."""
    if name not in files:
        return {}
    return json.loads(files[name].decode("utf-8-sig"))  # some editors write a byte-order mark


def chat_template(files: TextFiles) -> str | None:
    """Return the template of a conversation, in Jinja, or None."""
    if CHAT_TEMPLATE in files:
        return files[CHAT_TEMPLATE].decode()
    template = parse_text_file(files, TOKENIZER_CONFIG).get("chat_template")
    return template if isinstance(template, str) else None


def read_folder_tokenizer(folder: Path, vocab_size: int = sys.maxsize) -> Tokenizer:
    """Read the tokenizer of a folder, with the tokens that `tokenizer_config.json` adds.

    Tokens past the model's `vocab_size` are left out, since the model has no embedding for them.
    Raises ValueError for files beside `tokenizer.json` with which a text has other tokens.
    """
    if (folder / TOKENIZER_JSON).is_file():
        tokenizer = read_tokenizer(folder / TOKENIZER_JSON)
    elif any((folder / name).is_file() for name in ("vocab.json", "encoder.json")):
        tokenizer = BPETokenizer.from_gpt2(folder)
    else:
        found = ""
        if (folder / "tokenizer.model").is_file():
            found = ", but a tokenizer.model of SentencePiece"
        raise FileNotFoundError(
            f"{folder} has no {TOKENIZER_JSON}{found}: copy it from where the weights are from, or "
            f"{_WRITE_AGAIN}"
        )
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    files = read_text_files(folder, folder)
    config = parse_text_file(files, TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in config:  # which replaces this older file
        config |= parse_text_file(files, SPECIAL_TOKENS)
    backend = tokenizer.to_hf()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    with prefix_errors(folder):
        _require_same_splits(config, backend)
        for token in _added_tokens(config, known):
            is_new = backend.token_to_id(token.content) is None
            if is_new and backend.get_vocab_size() >= vocab_size:
                continue
            if token.special:
                backend.add_special_tokens([token])
            else:
                backend.add_tokens([token])
        for content in parse_text_file(files, ADDED_TOKENS):
            if backend.token_to_id(content) is None:
                raise ValueError(
                    f"{ADDED_TOKENS} has {content!r}, an unknown token: {_WRITE_AGAIN}"
                )
    return BPETokenizer(backend)


def _require_same_splits(config: dict[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError for fields with which transformers splits a text otherwise."""
    expected = {"split_special_tokens": False}
    splitting = json.loads(backend.to_str())["pre_tokenizer"] or {}
    for part in splitting.get("pretokenizers", [splitting]):
        if part.get("type") == "ByteLevel":
            expected["add_prefix_space"] = part["add_prefix_space"]
    for name, value in expected.items():
        if config.get(name) not in (None, value):
            raise ValueError(
                f"{TOKENIZER_CONFIG} has {name} {config[name]}, with which a text has other tokens "
                f"than with {TOKENIZER_JSON}: {_WRITE_AGAIN}"
            )


def _added_tokens(config: dict[str, Any], known: set[str]) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens of `tokenizer_config.json` that transformers adds, in its order.

    Those with a number may redefine which spaces a known token includes; those with a role only
    name tokens, and change nothing about known ones.
    """
    numbered = config.get("added_tokens_decoder", {})
    for number in sorted(numbered, key=int):
        yield _added_token(numbered[number])
    known = known | {fields["content"] for fields in numbered.values()}
    named = [config.get(name) for name in NAMED_TOKENS]
    for name in MORE_NAMED_TOKENS:
        named.extend(config.get(name) or [])
    for value in filter(None, named):
        token = _added_token(value)
        if token.content not in known:
            yield token


def _added_token(value: Any) -> tokenizers.AddedToken:
    """Make a special token from its text, or a token from its fields."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, normalized=False, special=True)
    fields = dict(value)
    fields.pop("__type", None)
    return tokenizers.AddedToken(**fields)


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `tokenizer_config.json` of a tokenizer that jgpt made.

    Its special token has all the roles that programs ask for, as in GPT-2. No other token is named,
    since transformers would add it beyond the model's embedding.
    """
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Otherwise version 4 of transformers removes spaces before punctuation.
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.end_of_text is not None:
        for name in ("bos_token", "eos_token", "unk_token"):
            values[name] = END_OF_TEXT
    return values


def write_tokenizer(tokenizer: Tokenizer, files: TextFiles, directory: Path) -> None:
    """Write `tokenizer.json`, and a `tokenizer_config.json` if the files have none."""
    tokenizer.to_hf().save(str(directory / TOKENIZER_JSON))
    if TOKENIZER_CONFIG not in files:
        text = json.dumps(_tokenizer_config(tokenizer), indent=2)
        (directory / TOKENIZER_CONFIG).write_text(text + "\n")


def write_text_files(files: TextFiles, directory: Path) -> None:
    """Write files unchanged."""
    for name, data in files.items():
        (directory / name).write_bytes(data)
