"""The files about text in a Hugging Face folder: tokenizer, special tokens, chat template,
generation.

An import keeps these files unchanged in the run, and an export writes them again, so that
transformers stops, pads and fills the template as before.
"""

import json
import sys
from collections.abc import Container, Iterator
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
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's additional chat templates."""
NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
MORE_NAMED_TOKENS = ("additional_special_tokens", "extra_special_tokens")

TextFiles = dict[str, bytes]
"""The content of files by their path in the folder."""


def read_text_files(model_folder: Path, tokenizer_folder: Path) -> TextFiles:
    """Read the files about text of a model, and those of its tokenizer.

    Raises ValueError naming a file that should be JSON and is not.
    """
    paths = {name: model_folder / name for name in OF_THE_MODEL}
    for name in OF_THE_TOKENIZER:
        paths[name] = tokenizer_folder / name
    for path in sorted((tokenizer_folder / MORE_TEMPLATES).glob("*.jinja")):
        paths[f"{MORE_TEMPLATES}/{path.name}"] = path
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
    """Read the tokenizer of a folder, with the tokens that files beside `tokenizer.json` add.

    transformers adds them when it reads the folder. Tokens past the model's `vocab_size` are left
    out, since the model has no embedding for them.
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
            "write it with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    files = read_text_files(folder, folder)
    backend = tokenizer.to_hf()
    with prefix_errors(folder):
        _require_same_splits(parse_text_file(files, TOKENIZER_CONFIG), backend)
        _add_tokens(backend, files, vocab_size)
    return BPETokenizer(backend)


def _require_same_splits(config: dict[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError for fields with which transformers splits a text otherwise.

    For some classes they decide, and for others `tokenizer.json` does.
    """
    given = {"split_special_tokens": bool(config.get("split_special_tokens"))}
    expected = {"split_special_tokens": False}
    adds_prefix_space = _adds_prefix_space(backend)
    if adds_prefix_space is not None and config.get("add_prefix_space") is not None:
        given["add_prefix_space"] = config["add_prefix_space"]
        expected["add_prefix_space"] = adds_prefix_space
    for name, value in given.items():
        if value != expected[name]:
            raise ValueError(
                f"{TOKENIZER_CONFIG} has {name} {value}, with which a text has other tokens than "
                f"with {TOKENIZER_JSON}: write both again with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )


def _adds_prefix_space(backend: tokenizers.Tokenizer) -> bool | None:
    """Return whether byte-level splitting puts a space before a text; None for other splitting."""
    splitting = json.loads(backend.to_str())["pre_tokenizer"] or {}
    for part in splitting.get("pretokenizers", [splitting]):
        if part.get("type") == "ByteLevel":
            return part["add_prefix_space"]
    return None


def _add_tokens(backend: tokenizers.Tokenizer, files: TextFiles, largest_size: int) -> None:
    """Add the tokens of the files, up to a vocabulary of `largest_size`."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in list(_added_tokens(files, known)):
        is_new = backend.token_to_id(token.content) is None
        if is_new and backend.get_vocab_size() >= largest_size:
            continue
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _added_tokens(files: TextFiles, known: set[str]) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens that files beside `tokenizer.json` add to the `known` ones in it.

    As in transformers, `added_tokens_decoder` may redefine which spaces a known token includes. The
    other files only name tokens and change nothing about known ones.
    """
    config = parse_text_file(files, TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:  # this field replaces the two older files
        named = _named_tokens(config)
        numbered = {}
        for number, fields in config["added_tokens_decoder"].items():
            numbered[int(number)] = _added_token(fields)
    else:
        named = _named_tokens(_named_in_older_files(files, config))
        numbered = _numbered_in_older_file(files, named.keys(), known)
    # In the order of their numbers, which the tokenizer assigns consecutively.
    for number in sorted(numbered):
        yield numbered[number]
    numbered_texts = {token.content for token in numbered.values()}
    for content, token in named.items():
        if content not in known and content not in numbered_texts:
            yield token


def _named_in_older_files(files: TextFiles, config: dict[str, Any]) -> dict[str, Any]:
    """Return the named tokens of `tokenizer_config.json` and `special_tokens_map.json`.

    The latter takes precedence for a single token of a name, the former for lists of tokens.
    """
    names = config | parse_text_file(files, SPECIAL_TOKENS)
    for name in MORE_NAMED_TOKENS:
        if config.get(name):
            names[name] = config[name]
    return names


def _numbered_in_older_file(
    files: TextFiles, named: Container[str], known: set[str]
) -> dict[int, tokenizers.AddedToken]:
    """Return the unknown tokens of `added_tokens.json` by their numbers."""
    numbered = {}
    for content, number in parse_text_file(files, ADDED_TOKENS).items():
        if content in known:
            continue
        # This file has only texts and numbers, so a token is special if another file names it.
        is_special = content in named
        numbered[number] = tokenizers.AddedToken(
            content, normalized=not is_special, special=is_special
        )
    return numbered


def _named_tokens(values: dict[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """Return the special tokens that a file names, by their text."""
    tokens = {}
    for name in NAMED_TOKENS:
        if values.get(name):
            token = _added_token(values[name])
            tokens[token.content] = token
    for name in MORE_NAMED_TOKENS:
        more = values.get(name) or []
        if isinstance(more, dict):  # by names that the tokenizer chooses
            more = more.values()
        for value in more:
            token = _added_token(value)
            tokens[token.content] = token
    return tokens


def _added_token(value: Any) -> tokenizers.AddedToken:
    """Make a special token from its text, or a token from its fields."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, normalized=False, special=True)
    fields = {}
    for name in ("content", "single_word", "lstrip", "rstrip", "normalized", "special"):
        if name in value:
            fields[name] = value[name]
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
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def without_tokens_past(values: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return a config without special tokens for which a model of this vocabulary has no embedding.

    A config may name a token in the padding of a vocabulary.
    """
    kept = {}
    for name, value in values.items():
        if not name.endswith("_token_id"):
            kept[name] = value
            continue
        tokens = value
        if not isinstance(value, list):  # several tokens may end a text
            tokens = [value]
        if not any(isinstance(token, int) and token >= vocab_size for token in tokens):
            kept[name] = value
            continue
        inside = [token for token in tokens if token < vocab_size]
        if inside and isinstance(value, list):
            kept[name] = inside
    return kept
