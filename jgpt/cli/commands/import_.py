"""`jgpt import`: other programs' weights as a run."""

import dataclasses
import signal
from pathlib import Path
from typing import Annotated, Any, Literal

from jgpt.cli import terminal
from jgpt.cli.arguments import Lines, shell_command
from jgpt.cli.options import OptionError, OptionSpec
from jgpt.cli.signals import interrupted_by
from jgpt.config import ComputeDtype, DataConfig
from jgpt.words import counted


def import_(
    source: Annotated[str, OptionSpec("DIR|FILE|NAME", positional=True)],
    out: Annotated[str | None, OptionSpec("RUN")] = None,
    from_: Literal["hf", "nanogpt"] = "hf",
    block_size: Annotated[int | None, OptionSpec("N")] = None,
    dtype: ComputeDtype = "float32",
    tokenizer: Annotated[str | None, OptionSpec("DIR|FILE")] = None,
    data: Annotated[tuple[str, ...], OptionSpec("TEXT")] = DataConfig().data,
) -> Lines:
    """Import the weights of GPT-2, Llama, SmolLM2, Qwen3 or nanoGPT as a run.

    Args:
        source: A Hugging Face folder (config.json, model.safetensors), or nanoGPT's ckpt.pt;
            hub:OWNER/NAME, gpt2, smollm2, smollm2-chat and qwen3 are fetched from the hub.
        out: The run directory to write; by default runs/ and the name of the source.
        from_: The format of the weights.
        block_size: The context length of a model with rotary positions; the config's by default.
        dtype: The dtype of matrix products; auto is bfloat16 where that is fast.
        tokenizer: A folder, a tokenizer.json, or a text with all characters. By default, the
            source.
        data: The text to evaluate on and to train further with.
    """
    path = Path(out or _run_named_after(source))
    if path.exists():  # before loading, which may take a while
        raise ValueError(f"{path} already exists: choose another directory with --out")
    if block_size is not None and from_ == "nanogpt":
        raise OptionError(f"--block-size {block_size} needs rotary positions, which nanoGPT lacks")

    with terminal.importing() as status:
        from jgpt.interop import hub, huggingface, names, nanogpt
        from jgpt.interop.text_files import read_text_files
        from jgpt.runs.load import fine_tuning_config, save

        status.update(f"loading {source}")
        if from_ == "nanogpt":
            folder = Path(source)
            model = nanogpt.load_nanogpt(source)
            text_files = {}
        else:
            folder = hub.find_model(source)
            model = huggingface.load_hf(folder, block_size=block_size)
            # a single file, as --tokenizer may be, says nothing about special tokens
            text_files = read_text_files(folder, Path(tokenizer or folder))
        model_tokenizer = _tokenizer(folder, tokenizer, model.vocab_size)
        if tokenizer is not None:  # one beside the weights is theirs, however small it is
            names.require_its_tokenizer(model, model_tokenizer)
        model_tokenizer = names.with_padding(model_tokenizer, model.vocab_size)
    config = fine_tuning_config(
        dataclasses.replace(model.config, dtype=dtype),
        DataConfig(data=data, tokenizer=_kind_of(model_tokenizer)),
    )
    with interrupted_by(signal.default_int_handler):
        save(model, path, tokenizer=model_tokenizer, config=config, text_files=text_files)
    return [
        f"{counted(model.config.num_layers, 'layer')}, {model.config.embed_dim} features, "
        f"vocabulary {model.vocab_size}; next: {shell_command('sample', path)}"
    ]


def _run_named_after(source: str) -> Path:
    """The run in runs/ with the name of a model of the hub, or of the folder of the weights."""
    path = Path(source.removeprefix("hub:")).resolve()
    if path.is_file():  # such as out/ckpt.pt
        path = path.parent
    return Path("runs", path.name)


def _kind_of(tokenizer: Any) -> Literal["char", "byte", "bpe"]:
    """The name that a config has for a tokenizer."""
    from jgpt.data.characters import ByteTokenizer, CharTokenizer

    match tokenizer:
        case CharTokenizer():
            return "char"
        case ByteTokenizer():
            return "byte"
    return "bpe"


def _tokenizer(source: Path, option: str | None, vocab_size: int) -> Any:
    """The tokenizer of --tokenizer, or else the one beside the weights."""
    from jgpt.data.characters import CharTokenizer
    from jgpt.data.encode import read_tokenizer
    from jgpt.data.sources import read_text
    from jgpt.interop.text_files import read_folder_tokenizer

    path = Path(option or source)
    if path.is_dir():
        return read_folder_tokenizer(path, vocab_size)
    if path.suffix == ".json":
        return read_tokenizer(path)
    if option is None:  # nanoGPT's ckpt.pt, which has none
        raise ValueError(f"{path} has no tokenizer next to it: give --tokenizer")
    # the characters of the text that the model was trained on, as nanoGPT orders them
    return CharTokenizer.from_text(read_text((option,)))
