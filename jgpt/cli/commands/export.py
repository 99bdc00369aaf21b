"""`jgpt export`: a run's weights for other programs."""

import signal
from typing import Annotated

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Checkpoint, Lines, Run
from jgpt.cli.options import (
    OptionSpec,
)
from jgpt.cli.signals import interrupted_by


def export(
    run: Run,
    out: Annotated[str, OptionSpec("DIR", "The directory to write.")],
    zero_biases: bool = False,
    checkpoint: Checkpoint = "best",
) -> Lines:
    """Export a run's model as a Hugging Face directory of GPT-2, Llama or Qwen3.

    Args:
        zero_biases: Write zeros for biases that the model lacks and GPT-2's format requires.
    """
    with terminal.importing():
        from jgpt.interop.formats import hf_config
        from jgpt.runs.directory import RunDirectory, run_and_step

        # before the model is loaded, which may take a while: it raises for a model without a format
        directory = RunDirectory.open(run_and_step(run)[0])
        config = directory.config()
        hf_config(config.model, zero_biases=zero_biases)
        # tokenizer and settings of generation go out as they came in
        imported = directory.imported()
    with runs.loaded_run(run, checkpoint) as (model, tokenizer, _):
        from jgpt.interop.huggingface import save_hf

        with interrupted_by(signal.default_int_handler):
            save_hf(model, out, tokenizer=tokenizer, zero_biases=zero_biases, like=imported)
    return [f"wrote {out}, for transformers.AutoModelForCausalLM.from_pretrained"]
