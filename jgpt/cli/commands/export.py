"""`jgpt export`: a run's weights for other programs."""

import signal
from pathlib import Path
from typing import Annotated, Any, Literal

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Checkpoint, Lines, Run
from jgpt.cli.options import OptionError, OptionSpec
from jgpt.cli.signals import interrupted_by
from jgpt.config import ModelConfig


def export(
    run: Run,
    out: Annotated[str | None, OptionSpec("DIR|FILE")] = None,
    to: Literal["hf", "gguf"] = "hf",
    weights: Literal["f32", "f16", "q8_0"] = "f32",
    modelfile: bool = False,
    checkpoint: Checkpoint = "best",
) -> Lines:
    """Export a run's model for transformers, or for llama.cpp and Ollama.

    Args:
        out: What to write; by default RUN/hf, or RUN/NAME.gguf.
        to: A Hugging Face folder of GPT-2, Llama, Qwen3 or Apertus, or a GGUF file of these.
        weights: How a GGUF file stores matrices: in 32, 16 or 8.5 bits a weight.
        modelfile: Write Ollama's Modelfile beside the GGUF file.
    """
    if to == "hf" and (weights != "f32" or modelfile):
        raise OptionError("--weights and --modelfile are for --to gguf")
    with terminal.importing():
        from jgpt.interop.formats import hf_config
        from jgpt.runs.directory import RunDirectory, run_and_step

        # before the model is loaded, which may take a while: it raises for a model without a format
        path = run_and_step(run)[0]
        directory = RunDirectory.open(path)
        hf_config(directory.config().model)
        # tokenizer and settings of generation go out as they came in
        imported = directory.imported()
    with (
        runs.loaded_run(run, checkpoint) as (model, tokenizer, _),
        interrupted_by(signal.default_int_handler),
    ):
        if to == "hf":
            from jgpt.interop.huggingface import save_hf

            folder = out or path / "hf"
            save_hf(model, folder, tokenizer=tokenizer, like=imported)
            return [f"wrote {folder}, for transformers.AutoModelForCausalLM.from_pretrained"]
        from jgpt.data.characters import CharTokenizer
        from jgpt.interop.gguf import rarest_token, save_gguf

        file = Path(out or path / f"{path.resolve().name}.gguf")
        save_gguf(model, file, tokenizer=tokenizer, weights=weights, like=imported)
        lines = [f"wrote {file}: llama-cli -m {file}"]
        if isinstance(tokenizer, CharTokenizer):
            end = tokenizer.characters[rarest_token(model)]
            lines.append(f"llama.cpp ends a text at {end!r}, which the model draws least")
    if model.config.activation == "gelu":
        lines.append("llama.cpp computes the exact GELU by its tanh approximation")
    if modelfile:
        written = _write_modelfile(file, model.config)
        lines.append(f"wrote {written}: ollama create {file.stem} -f {written}")
    return lines


def _write_modelfile(file: Path, config: ModelConfig) -> Path:
    """Write what Ollama reads beside a GGUF file: a text is continued as it is."""
    path: Path = file.with_name("Modelfile")
    lines: list[Any] = [
        f"FROM ./{file.name}",
        f"PARAMETER num_ctx {config.block_size}",
        'TEMPLATE "{{ .Prompt }}"',
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
