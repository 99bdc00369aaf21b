"""`jgpt eval`: the exact loss of a run."""

import dataclasses
import math
from json import dumps
from typing import Literal

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Checkpoint, LatestRun, Lines, MeshOption, ModelOption
from jgpt.cli.terminal import open_console


def eval_(
    run: LatestRun = None,
    json: bool = False,
    checkpoint: Checkpoint = "best",
    split: Literal["validation", "test"] = "validation",
    model: ModelOption = None,
    mesh: MeshOption = None,
) -> Lines:
    """Compute a run's exact loss on the whole validation or test split.

    Args:
        split: The split to evaluate on. There is a test split if the run has a test_fraction.
        json: Print one JSON object.
    """
    run = runs.run_or_latest(run)
    with terminal.importing():
        from jgpt.cli.console import ConsoleProgress
        from jgpt.fitting.evaluate import evaluate
        from jgpt.parallel.mesh import use_mesh

    with use_mesh(mesh), ConsoleProgress(open_console(stderr=True), "evaluating") as progress:
        result = evaluate(run, which=checkpoint, split=split, model=model, progress=progress)
    if json:
        values = dataclasses.asdict(result)
        if math.isinf(result.perplexity):  # which JSON has no number for
            values["perplexity"] = None
        return [dumps(values, allow_nan=False)]
    return [
        f"{split + ' loss':<18}  {result.loss:.4f} nats per token, over {result.tokens:,} targets",
        f"perplexity          {result.perplexity:.3f}",
        f"bits per character  {result.bits_per_character:.4f}",
    ]
