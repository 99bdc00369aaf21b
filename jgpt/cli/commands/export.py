"""`jgpt export`: a run's weights for other programs."""

import signal
from pathlib import Path
from typing import Annotated, Literal

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Checkpoint, Lines, Run
from jgpt.cli.options import OptionError, OptionSpec
from jgpt.cli.signals import interrupted_by

_CHAT = '''\
TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
PARAMETER stop <|im_start|>
PARAMETER stop <|im_end|>
'''
"""ChatML in Ollama's words. Without it Ollama looks for a template like that of the GGUF file among
those that it knows, and may find none."""


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
        out: What to write; by default exports/NAME or exports/NAME.gguf, by the run's name.
        to: A Hugging Face folder of GPT-2, Llama, Qwen3 or Apertus, or a GGUF file of these.
        weights: How a GGUF file stores matrices: in 32, 16 or 8.5 bits a weight.
        modelfile: Write Ollama's Modelfile beside the GGUF file.
    """
    if to == "hf" and (weights != "f32" or modelfile):
        raise OptionError("--weights and --modelfile need --to gguf")
    with terminal.importing():
        from jgpt.interop.formats import hf_config
        from jgpt.runs.directory import RunDirectory, run_and_step

        path, _ = run_and_step(run)
        directory = RunDirectory.open(path)
        # before the model is loaded, which may take a while: it raises for a model without a format
        hf_config(directory.config().model)
        # tokenizer and settings of generation go out as they came in
        imported = directory.imported()
    default = Path("exports", path.resolve().name)
    with (
        runs.loaded_run(run, checkpoint) as (model, tokenizer, _),
        interrupted_by(signal.default_int_handler),
    ):
        if to == "hf":
            from jgpt.interop.huggingface import save_hf

            folder = Path(out or default)
            save_hf(model, folder, tokenizer=tokenizer, like=imported)
            return [f"wrote {folder}, for transformers.AutoModelForCausalLM.from_pretrained"]
        from jgpt.generation.chat import can_chat
        from jgpt.interop.gguf import remarks, save_gguf

        file = Path(out or f"{default}.gguf")
        save_gguf(model, file, tokenizer=tokenizer, weights=weights, like=imported)
        lines = [f"wrote {file}, for llama-cli -m {file}", *remarks(model, tokenizer)]
        if modelfile:
            made = file.with_name("Modelfile")
            text = f"FROM ./{file.name}\nPARAMETER num_ctx {model.block_size}\n"
            if can_chat(tokenizer):
                text += _CHAT
            made.write_text(text)
            lines.append(f"wrote {made}, for ollama create {file.stem} -f {made}")
    return lines
