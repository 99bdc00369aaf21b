"""`jgpt eval`: the exact loss of a run."""

import dataclasses
from json import dumps
from typing import Annotated, Literal

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Checkpoint, LatestRun, Lines, MeshOption, ModelOption
from jgpt.cli.options import OptionSpec
from jgpt.cli.terminal import open_console


def eval_(
    run: LatestRun = None,
    json: bool = False,
    checkpoint: Checkpoint = "best",
    split: Literal["validation", "test"] = "validation",
    data: Annotated[tuple[str, ...], OptionSpec("TEXT")] = (),
    data_field: Annotated[str | None, OptionSpec("NAME")] = None,
    model: ModelOption = None,
    mesh: MeshOption = None,
) -> Lines:
    """Compute a run's exact loss on the whole validation or test split, or on another text.

    Args:
        split: The split to evaluate on. There is a test split if the run has a test_fraction.
        data: Another text instead of a split: what --data of jgpt train takes. All of it is
            evaluated, with the run's tokenizer.
        data_field: The field or column of JSON lines and Parquet that has the other text. By
            default that of the run.
        json: Print one JSON object.
    """
    run = runs.run_or_latest(run)
    with terminal.importing():
        from jgpt.cli.console import ConsoleProgress
        from jgpt.parallel.mesh import use_mesh
        from jgpt.runs.directory import run_and_step
        from jgpt.runs.evaluate import evaluate

    console = open_console(stderr=True)
    path, step = run_and_step(run)
    with use_mesh(mesh), ConsoleProgress(console, "evaluating") as progress:
        result = evaluate(
            path,
            which=checkpoint if step is None else step,
            split=split,
            data=data,
            data_field=data_field,
            model=model,
            progress=progress,
        )
    if json:
        return [dumps(dataclasses.asdict(result))]
    lines = []
    loss = f"{split} loss"
    if result.data is not None:
        lines.append(f"text                {result.data}")
        loss = "loss"
    lines.append(f"{loss:<18}  {result.loss:.4f} nats per token, over {result.tokens:,} targets")
    lines.append(f"perplexity          {result.perplexity:.3f}")
    if result.bits_per_character is not None:
        lines.append(f"bits per character  {result.bits_per_character:.4f}")
    return lines
