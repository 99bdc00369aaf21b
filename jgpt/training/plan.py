"""Plans: the memory and compute of a run before it starts."""

from dataclasses import dataclass
from pathlib import Path

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.nn.costs import flops_per_token, parts_of
from jgpt.training.evaluation import targets_of
from jgpt.training.memory import TrainingMemory, training_memory


@dataclass(frozen=True)
class Plan:
    """The size and cost of a run."""

    config: TrainConfig
    out: Path
    training_tokens: int
    validation_tokens: int
    parameters: int
    memory: TrainingMemory | None
    flops: int
    """The FLOPs of all steps."""
    evaluation_targets: int


def make_plan(config: TrainConfig, dataset: Dataset, out: Path) -> Plan:
    """Plan a run on a dataset; `out` is its directory."""
    tokens = config.steps * config.batch_size * config.model.block_size
    return Plan(
        config=config,
        out=out,
        training_tokens=len(dataset.train),
        validation_tokens=len(dataset.validation),
        parameters=sum(part.parameters for part in parts_of(config.model)),
        memory=training_memory(config),
        # the backward pass takes twice as many FLOPs
        flops=3 * flops_per_token(config.model) * tokens,
        evaluation_targets=targets_of(config, len(dataset.validation)),
    )
