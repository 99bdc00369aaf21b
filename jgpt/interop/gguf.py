"""A model as one GGUF file, which llama.cpp and Ollama run."""

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jgpt.config import ModelConfig
from jgpt.data.byte_pairs import BPETokenizer
from jgpt.data.characters import CharTokenizer, bytes_of_letters
from jgpt.data.encode import Tokenizer
from jgpt.files import make_directory
from jgpt.interop.formats import APERTUS, GPT2, LLAMA, QWEN3, Format, hf_config, natural_format
from jgpt.interop.huggingface import require_exportable
from jgpt.interop.names import Entry, with_padding, write_tensors
from jgpt.interop.text_files import (
    HF_CONFIG,
    TextFiles,
    chat_template,
    parse_text_file,
    read_text_files,
)
from jgpt.nn.models import LanguageModel
from jgpt.nn.transformer import GPT
from jgpt.shapes.contract import typed

WeightType = Literal["f32", "f16", "q8_0"]
"""How matrices are stored: in 32, 16 or 8.5 bits a weight. Vectors are always float32."""
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_BLOCK = 32
"""The numbers that share a scale in Q8_0: a row of another length is stored as F16."""
_GELU_STEP = 2.0**20
"""gelu(s x) / s is ReLU but for x within 10 / s of 0; GELU is all that llama.cpp's GPT-2 has."""
_SPLITS = {
    # the pattern, what `ignore_merges` is, and the name in llama.cpp
    ("ByteLevel", False): "gpt-2",
    ("Digits ByteLevel", False): "smollm",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        True,
    ): "llama-bpe",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        False,
    ): "qwen2",
}
"""Ways to split a text into words. A converter that guesses one gives other tokens."""


class _Tensor(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: Any
    """One of GGML's types of numbers."""
    read: Callable[[], np.ndarray]


def save_gguf(
    model: LanguageModel,
    file: str | Path,
    *,
    tokenizer: Tokenizer,
    weights: WeightType = "f32",
    like: str | Path | None = None,
) -> None:
    """Save a model and its tokenizer as a GGUF file for llama.cpp.

    The architecture is gpt2, llama, qwen3 or apertus, as in `save_hf`. Tensors are made and written
    one by one. `like` is the folder that the model was loaded from: its chat template and the token
    that ends an answer are saved, too. Raises ValueError for a model or a tokenizer that llama.cpp
    lacks, OSError if the file can't be written, and ModuleNotFoundError without the package gguf.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError("GGUF needs the package gguf: pip install 'jgpt[gguf]'") from None
    file = Path(file)
    model = require_exportable(model)
    tokenizer = with_padding(tokenizer, model.vocab_size)
    format = natural_format(model.config)
    _require_activation(model.config, format)
    if file.exists():
        raise FileExistsError(f"{file} already exists: choose another file")
    make_directory(file.parent)
    partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")
    writer = gguf.GGUFWriter(partial, hf_config(model.config)["model_type"])
    _describe_model(writer, model.config, format)
    files: TextFiles = {}
    if like is not None:
        files = read_text_files(Path(like), Path(like))
    _describe_tokenizer(writer, tokenizer, model, files)
    writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[weights]))
    tensors = list(_tensors(gguf, model.config, format, write_tensors(model, format), weights))
    for tensor in tensors:
        size = _bytes(gguf, tensor)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), size, tensor.type)
    try:
        with contextlib.closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                values = np.ascontiguousarray(tensor.read(), np.float32)
                writer.write_tensor_data(gguf.quantize(values, tensor.type))
        os.replace(partial, file)
    except OSError as error:  # NumPy's says only how much it has written
        raise OSError(f"{file} can't be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _bytes(gguf: Any, tensor: _Tensor) -> int:
    *rows, row = tensor.shape
    numbers, size = gguf.GGML_QUANT_SIZES[tensor.type]
    return math.prod(rows) * row // numbers * size


def _require_activation(config: ModelConfig, format: Format) -> None:
    """Raise ValueError for an activation that llama.cpp doesn't have in an architecture.

    It reads no activation from a file: each architecture has its own.
    """
    activations: dict[str, tuple[str, ...]] = {
        GPT2.name: ("gelu_tanh", "gelu", "relu"),
        APERTUS.name: ("relu_squared",),
        LLAMA.name: ("silu",),
        QWEN3.name: ("silu",),
    }
    known = activations[format.name]
    if config.activation not in known:
        raise ValueError(
            f"llama.cpp's {format.name} doesn't support `activation={config.activation!r}`, only "
            f"{' and '.join(known)}"
        )


def _describe_model(writer: Any, config: ModelConfig, format: Format) -> None:
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.hidden_dim or 4 * config.embed_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads or config.num_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    if format is GPT2:
        writer.add_layer_norm_eps(config.norm_epsilon)
        return
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rotary_base)
    writer.add_rope_dimension_count(config.head_size)
    if format is APERTUS:
        # xIELU with these numbers is the squared ReLU (its paper's equation has softplus of them)
        layers = config.num_layers
        writer.add_xielu_alpha_p([math.log(math.e - 1)] * layers)
        writer.add_xielu_alpha_n([-1e4] * layers)
        writer.add_xielu_beta([0.0] * layers)
        writer.add_xielu_eps([-1e-6] * layers)


# --- tensors -------------------------------------------------------------------------------------


def _tensors(
    gguf: Any, config: ModelConfig, format: Format, entries: dict[str, Entry], weights: WeightType
) -> Iterator[_Tensor]:
    """Yield the tensors of a file, from those of the Hugging Face format."""
    architecture = getattr(gguf.MODEL_ARCH, format.name.replace("-", "").upper())
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    if format is APERTUS and config.tie_embeddings:  # it has no tied head
        entries = entries | {"lm_head.weight": entries["model.embed_tokens.weight"]}
    for name, entry in entries.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # GPT-2's Conv1D stores (in, out)
        is_transposed = name.startswith("transformer.h.") and len(entry.shape) == 2
        shape = tuple(entry.shape)
        if is_transposed:
            shape = shape[::-1]
        read = _changed(config, format, name, entry.read, is_transposed)
        yield _Tensor(theirs, shape, _type_of(gguf, config, theirs, shape, weights), read)


def _type_of(
    gguf: Any, config: ModelConfig, name: str, shape: tuple[int, ...], weights: WeightType
) -> Any:
    """Return the type of the numbers of a tensor."""
    types = gguf.GGMLQuantizationType
    # weights times 2^20 are beyond float16
    is_large = config.activation == "relu" and ".ffn_" in name
    if len(shape) == 1 or weights == "f32" or is_large or name.startswith("position_embd"):
        return types.F32
    if weights == "q8_0" and shape[-1] % _BLOCK == 0:
        return types.Q8_0
    return types.F16


def _changed(
    config: ModelConfig,
    format: Format,
    name: str,
    read: Callable[[], np.ndarray],
    is_transposed: bool,
) -> Callable[[], np.ndarray]:
    """Return a function that reads a tensor as llama.cpp has it."""

    def changed() -> np.ndarray:
        values = read()
        if is_transposed:
            values = values.T
        if format is LLAMA and name.endswith("q_proj.weight"):
            values = _neighbours(values, config.num_heads)
        if format is LLAMA and name.endswith("k_proj.weight"):
            values = _neighbours(values, config.num_kv_heads or config.num_heads)
        if config.activation == "relu" and ".mlp.c_fc." in name:
            values = values * _GELU_STEP
        if config.activation == "relu" and name.endswith(".mlp.c_proj.weight"):
            values = values / _GELU_STEP
        return values

    return changed


@typed
def _neighbours(
    weights: Float[np.ndarray, "rows features"], heads: int
) -> Float[np.ndarray, "rows features"]:
    """Reorder the features of heads: llama.cpp's Llama rotates neighbours, and not halves."""
    in_halves = weights.reshape(heads, 2, -1, weights.shape[-1])
    return in_halves.swapaxes(1, 2).reshape(weights.shape)


# --- tokenizer -----------------------------------------------------------------------------------


def _describe_tokenizer(writer: Any, tokenizer: Tokenizer, model: GPT, files: TextFiles) -> None:
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer, BPETokenizer):
        _describe_byte_pairs(writer, tokenizer, files)
    else:
        _describe_characters(writer, tokenizer, model)
    template = chat_template(files)
    if template is not None:
        writer.add_chat_template(template)


def _describe_characters(writer: Any, tokenizer: Tokenizer, model: GPT) -> None:
    """Describe characters or bytes as byte-pairs that only join the bytes of a character."""
    import gguf

    tokens = [bytes([byte]) for byte in range(256)]
    end = 0xFF  # which never occurs in UTF-8
    if isinstance(tokenizer, CharTokenizer):
        tokens = [character.encode("utf-8", "surrogatepass") for character in tokenizer.characters]
        end = _rarest_token(model)
    elif tokenizer.vocab_size != len(tokens):
        raise ValueError("llama.cpp reads characters, bytes and byte-pairs, and no other tokenizer")
    letters = {byte: letter for letter, byte in bytes_of_letters().items()}
    merges = [f"{letters[0xFF]} {letters[0xFF]}"]  # llama.cpp needs one
    texts = []
    for token in tokens:
        first, *others = [letters[byte] for byte in token]
        for letter in others:
            merges.append(f"{first} {letter}")
            first += letter
        texts.append(first)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(texts))
    writer.add_token_merges(list(dict.fromkeys(merges)))
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)


def remarks(model: GPT, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what llama.cpp does otherwise than jgpt, a line for each."""
    if model.config.activation == "gelu":
        yield "llama.cpp computes the exact GELU by its tanh approximation"
    if isinstance(tokenizer, CharTokenizer):
        end = tokenizer.characters[_rarest_token(model)]
        yield f"llama.cpp ends a text at {end!r}, which the model draws least"


def _rarest_token(model: GPT) -> int:
    """Return the token that a model draws least after each single token.

    llama.cpp ends a text at some token, in any vocabulary: at token 11 unless another is named.
    """
    after_each = jax.nn.softmax(model(jnp.arange(model.vocab_size)[:, None]))
    return int(after_each.mean(axis=(0, 1)).argmin())


def _describe_byte_pairs(writer: Any, tokenizer: BPETokenizer, files: TextFiles) -> None:
    import gguf

    values = json.loads(tokenizer.to_hf().to_str())
    vocabulary: dict[str, int] = dict(values["model"]["vocab"])
    added = {token["id"]: token for token in values["added_tokens"]}
    texts = {token: text for text, token in vocabulary.items()}
    texts |= {number: token["content"] for number, token in added.items()}
    types = []
    for number in range(tokenizer.vocab_size):
        kind = gguf.TokenType.NORMAL
        if number in added:
            kind = gguf.TokenType.USER_DEFINED
            if added[number]["special"]:
                kind = gguf.TokenType.CONTROL
        elif number not in texts:
            kind = gguf.TokenType.UNUSED
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(values))
    names = [texts.get(number, f"[PAD{number}]") for number in range(tokenizer.vocab_size)]
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in values["model"]["merges"]])
    end = _end_of_answer(tokenizer, vocabulary, files)
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(next(iter(tokenizer.begin), end))
    writer.add_add_bos_token(len(tokenizer.begin) == 1)


def _end_of_answer(tokenizer: BPETokenizer, vocabulary: dict[str, int], files: TextFiles) -> int:
    """Return the token at which llama.cpp stops: without one it would stop at token 11."""
    named = parse_text_file(files, HF_CONFIG).get("eos_token_id")
    if isinstance(named, list):
        named = next(iter(named), None)
    if named is not None:
        return named
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    (never,) = [letter for letter, byte in bytes_of_letters().items() if byte == 0xFF]
    if never not in vocabulary:
        raise ValueError("llama.cpp needs a token that ends a text, and the tokenizer has none")
    return vocabulary[never]


def _split_name(values: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer splits a text into words."""
    splitting = values["pre_tokenizer"] or {}
    parts = splitting.get("pretokenizers", [splitting])
    words = []
    for part in parts:
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
                words.append("ByteLevel")
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
                pass
            case {"type": "Digits", "individual_digits": True}:
                words.append("Digits")
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                words.append(pattern)
            case _:
                words.append(str(part.get("type")))
    key = " ".join(words), bool(values["model"].get("ignore_merges"))
    if key not in _SPLITS or (values["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        raise ValueError(
            "llama.cpp has no name for the way in which this tokenizer splits a text into words"
        )
    return _SPLITS[key]
