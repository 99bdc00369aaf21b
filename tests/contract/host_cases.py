"""Cases of what works on the host: data, text, files, and weights under other names."""

import functools
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jgpt.data import dataset
from jgpt.data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer
from jgpt.interop import formats, names
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.profiling import Profiler
from tests.contract.contract import SIZES, Case
from tests.contract.device_cases import TRAIN, WEIGHTS
from tests.contract.model_cases import GPT

BATCH = SIZES["batch"]
HOST = functools.partial(Case, takes="numpy")
AB = {"text": "a"}
BATCHES = {"seed": 1, "batch_size": 4, "block_size": 8}
DATA = [
    HOST(
        "jgpt.data.dataset.Dataset.__init__",
        {"train": "integer tokens", "validation": "integer held_out", "test": "integer unseen"},
        owner=object.__new__(dataset.Dataset),
        static={"tokenizer": ByteTokenizer(), "digest": ""},
    ),
    HOST(
        "jgpt.data.dataset.count_characters",
        {"tokens": "integer tokens"},
        static={"tokenizer": ByteTokenizer()},
    ),
    HOST("jgpt.runs.loop._evaluators", {"held_out": "integer tokens"}, static={"config": TRAIN}),
    HOST("jgpt.data.dataset._digest", {"tokens": "integer tokens"}),
    HOST("jgpt.data.batches.resident", {"tokens": "integer tokens"}, (31,)),
    Case(
        "jgpt.data.batches.batches",
        {"tokens": "int tokens"},
        (6, 4, 9),
        static={**BATCHES, "first_step": 0, "steps": 6},
    ),
    HOST(
        "jgpt.data.batches.batches",
        {"tokens": "integer tokens"},
        (6, 4, 9),
        static={**BATCHES, "first_step": 0, "steps": 6},
        note="host",
    ),
    Case(
        "jgpt.data.batches.batch",
        {"tokens": "int tokens"},
        ((4, 8), (4, 8)),
        static={**BATCHES, "step": 2},
    ),
    HOST(
        "jgpt.data.batches.batch",
        {"tokens": "integer tokens"},
        ((4, 8), (4, 8)),
        static={**BATCHES, "step": 2},
        note="host",
    ),
    Case(
        "jgpt.data.batches.window_starts",
        {},
        (6, 4),
        static={**BATCHES, "first_step": 0, "steps": 6, "tokens": 31},
    ),
    Case(
        "jgpt.data.batches._window_starts",
        {"seed": "integer", "first_step": "integer", "positions": "integer"},
        (6, 4),
        static={"steps": 6, "batch_size": 4},
    ),
    Case(
        "jgpt.data.batches._gather",
        {"tokens": "int tokens", "starts": "integer steps batch"},
        (6, BATCH, 9),
        static={"block_size": 8},
    ),
    HOST(
        "jgpt.data.batches.evaluation_windows",
        {"tokens": "integer tokens"},
        ((2, 3, 9), (2, 3, 8)),
        static={"block_size": 8, "batch_size": 3},
    ),
]
CHARACTERS, BYTES = CharTokenizer("\0ab"), ByteTokenizer()
BYTE_PAIRS = BPETokenizer.train(["ab ab"], 257)
TEXT = [
    case
    for name, owner in (
        ("CharTokenizer", CHARACTERS),
        ("ByteTokenizer", BYTES),
        ("BPETokenizer", BYTE_PAIRS),
    )
    for case in (
        HOST(f"jgpt.data.tokenizers.{name}.encode", {}, (1,), owner=owner, static=AB, loose=True),
        HOST(f"jgpt.data.tokenizers.{name}.decode", {"tokens": "integer tokens"}, owner=owner),
    )
] + [
    HOST("jgpt.data.tokenizers._code_points", {}, (1,), static=AB, loose=True),
    HOST("jgpt.data.tokenizers._in_range", {"tokens": "integer tokens"}, static={"vocab_size": 3}),
]
FILES = [
    HOST(
        "jgpt.data.dataset._open_prepared",
        {},
        (31,),
        static={"directory": Path()},
        result=(np.zeros(31, np.uint16), BYTES),
        loose=True,
    ),
    Case(
        "jgpt.runs.checkpoints.Checkpoints.restore_weights",
        {},
        owner=object.__new__(Checkpoints),
        static={"config": TRAIN, "which": "last"},
        result=WEIGHTS,
    ),
]
TENSORS = names.to_torch(WEIGHTS)
REPORTS = [
    HOST(
        "jgpt.runs.plots._draw_run",
        {"x": "real steps"},
        static={
            "axes": Figure().add_subplot(),
            "metrics": [],
            "training": "black",
            "validation": "red",
        },
    ),
    HOST("jgpt.runs.plots._running_mean", {"losses": "real steps"}, (6,), static={"window": 3}),
    Case("jgpt.training.plan.bytes_of", {}, static={"tree": WEIGHTS}),
    Case(
        "jgpt.runs.profiling.Profiler.stepped",
        {},
        owner=Profiler(Path("profile"), 0),
        static={"count": 1, "result": WEIGHTS},
    ),
]
LOOK = [
    HOST(
        "jgpt.runs.look.encode_prompt",
        {},
        (1,),
        static={"model": GPT, "tokenizer": BYTES, "text": "a"},
        loose=True,
    ),
    Case("jgpt.runs.look.logit_lens", {"tokens": "int time"}, (2, 7, 17), static={"model": GPT}),
]
LAYOUT = [
    Case("jgpt.interop.names.to_torch", {}, takes="numpy", static={"weights": WEIGHTS}),
    Case("jgpt.interop.names.from_torch", {}, static={"tensors": TENSORS, "like": WEIGHTS}),
    Case(
        "jgpt.interop.names.write_tensors",
        {},
        takes="numpy",
        static={"model": GPT, "format": formats.GPT2},
    ),
    Case(
        "jgpt.interop.huggingface._write_weights",
        {},
        static={"tensors": TENSORS, "path": Path()},
        result=TENSORS,
    ),
]
ON_THE_HOST = [*DATA, *TEXT, *FILES, *LAYOUT, *REPORTS, *LOOK]
