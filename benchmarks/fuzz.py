"""Load mutated files of one format, or mutated options; only ValueError and OSError may come out.

A crash ends the process, as do an input that takes too long and memory that grows. Audit hooks
report programs that are executed, and files that are opened outside the directory being loaded.
Formats: config.json, tokenizer.json, token files, safetensors, metrics.jsonl, checkpoints,
checkpoints with a manifest forged to fit the damage, and command-line options, which must be valid
or end with one line and exit code 2. `compare.py fuzz` does this for all of them.
The files of a run also get the faults that its tests have: lost, linked, larger than memory.
"""

import contextlib
import faulthandler
import io
import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from runner import ROOT, Figures, Variant, call

sys.path.insert(0, str(ROOT))  # the faults are the tests'

from tests.runs.faults import FAULTS, Fault, forge

SECONDS = 60
"""The time per input."""
MEBIBYTES = 1024
"""The growth of memory per format."""
SHARE_OF_FAULTS = 0.1
"""Of the inputs, in formats that have faults: each is one of a few, so more would repeat them."""
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
NUMBERS = (-1, 0, 1, 2**31, 2**63, 10**18, 10**400, 1e308, float("nan"), float("inf"))
VALUES = (*NUMBERS, None, True, "", "../../etc/passwd", "/etc/passwd", [], {}, [[[]]], "\ud800")


class Target(NamedTuple):
    """Files to mutate, a function that loads them, and a repair after each mutation."""

    files: list[Path]
    load: Callable[[], Any]
    repair: Callable[[Path], None] = lambda path: None
    detects_all: bool = False
    """Whether every changed file must be rejected."""
    opens_anything: bool = False
    """Whether loading may open any file, as with options that name files."""
    faults: tuple[Fault, ...] = ()
    """What is done to a file now and then, instead of mutating what is in it."""


def variant(format: str, inputs: int) -> Variant:
    command = call("fuzz", "fuzz", format=format, inputs=inputs, seed="{seed}")
    return Variant(format, command, environment={"JAX_PLATFORMS": "cpu"})


def fuzz(format: str, inputs: int, seed: str) -> Figures:
    """How many mutations are loaded and rejected. The process fails if something else came out."""
    logging.disable(logging.ERROR)
    chance = random.Random(f"{format} {seed}")
    count = {"inputs": inputs, "loaded": 0, "rejected": 0}
    escapes: list[str] = []
    grown = 0.0
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as outside:
        root = Path(directory).resolve()
        target = TARGETS[format](root)
        target.load()  # imports and compiles before anything is measured
        originals = {path: path.read_bytes() for path in target.files}
        before = peak_mebibytes()
        hook = AuditHook(root, escapes)
        for _ in range(inputs):
            path = chance.choice(target.files)
            name = str(path.relative_to(root))
            is_changed = True
            if target.faults and chance.random() < SHARE_OF_FAULTS:
                fault = chance.choice(target.faults)
                name += f", {fault.name}"
                fault.apply(path, Path(outside))
            else:
                mutant = mutated(originals[path], chance)
                is_changed = mutant != originals[path]
                replace(path, mutant)
            target.repair(path)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            hook.on = not target.opens_anything
            try:
                target.load()
                count["loaded"] += 1
                assert not (target.detects_all and is_changed), "a change is loaded"
            except (ValueError, OSError):
                count["rejected"] += 1
            except BaseException as error:
                escapes.append(f"{name}: {type(error).__name__}: {error}"[:300])
            hook.on = False
            faulthandler.cancel_dump_traceback_later()
            for other, content in originals.items():
                if other == path or not other.is_file():
                    replace(other, content)
            target.repair(path)
            grown = peak_mebibytes() - before
            if grown > MEBIBYTES:
                sys.exit(f"{name}: memory grew by {grown:.0f} MiB")
    if escapes:
        sys.exit("\n".join([f"{len(escapes)} escaped", *escapes[:5]]))
    return {**count, "grown_mib": round(grown)}


def peak_mebibytes() -> float:
    """The peak memory of this process. ru_maxrss begins with what the starting process had."""
    from jgpt.hardware import memory_in_use

    return (memory_in_use() or 0) / 2**20


class AuditHook:
    """Reports opened files and started programs while `on`."""

    def __init__(self, root: Path, found: list[str]) -> None:
        self.on = False
        self.found = found
        allowed = ["/dev/", "/proc/", "/sys/"]
        # a traceback reads source, and packages may be installed anywhere that Python looks
        for path in (root, sys.prefix, sys.base_prefix, ROOT, *sys.path):
            allowed.append(os.path.realpath(path) + os.sep)
        self.allowed = tuple(allowed)
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event.startswith(FORBIDDEN):
            self.found.append(f"{event} {arguments}"[:300])
        elif self.on and event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(self.allowed):
                self.found.append(f"opened {path}")


def replace(path: Path, content: bytes) -> None:
    if path.is_dir():
        path.rmdir()  # which a fault has put there
    path.unlink(missing_ok=True)  # memory-mapped files keep what they had
    path.write_bytes(content)


def mutated(original: bytes, chance: random.Random) -> bytes:
    """Apply one to three mutations, of bytes or of JSON values."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        values = None
        if chance.random() < 0.6:
            values = parsed(original)
        if values is None:  # or the bytes are no JSON
            original = mutated_bytes(original, chance)
        else:
            original = json.dumps(mutated_json(values, chance)).encode("utf-8", "surrogatepass")
    return original


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Replace a part, which may be empty, by other bytes. A header's length is at the start."""
    start = chance.choice((0, chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    end = start + chance.choice((0, 1, 1, 2, 4, 8, 64, 1000, len(data)))
    others = [
        b"",
        data[start:end] * 3,
        str(chance.choice(NUMBERS)).encode(),
        b"9" * 5000,  # more digits than Python makes an integer of
        b"[" * 10,
        b"[" * 100_000,  # deeper than a parser that calls itself can go
    ]
    for size in (1, 2, 8, 100):
        others.append(chance.randbytes(size))
    return data[:start] + chance.choice(others) + data[end:]


def mutated_json(values: Any, chance: random.Random) -> Any:
    """Change one value, name or item."""
    places = list(containers(values))
    if not places:
        return chance.choice(VALUES)
    place = chance.choice(places)
    keys = list(range(len(place)))
    if isinstance(place, dict):
        keys = list(place)
    key = chance.choice(keys)
    match chance.randrange(4):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[chance.choice(("../x", "", "type", "\ud800", str(key) + "x"))] = place.pop(key)
        case 2 if isinstance(place[key], int | float) and abs(place[key]) < 1e200:
            place[key] = place[key] * chance.choice((-1, 2, 0.5, 1000, 10**9))
        case _:
            place[key] = chance.choice(VALUES)
    return values


def containers(values: Any) -> Iterator[Any]:
    """All dicts and lists that are not empty, of long lists those of the first items."""
    if not isinstance(values, dict | list) or not values:
        return
    yield values
    items = list(values)[:50]
    if isinstance(values, dict):
        items = list(values.values())
    for item in items:
        yield from containers(item)


def parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# ---- what is loaded -----------------------------------------------------------------------------

LINE = "the quick brown fox jumps over the lazy dog\n"


def text_of(root: Path) -> Any:
    """A dataset of a short text."""
    from jgpt import DataConfig

    text = root / "text.txt"
    text.write_text(LINE * 20)
    return DataConfig(data=(str(text),))


def trained(root: Path) -> Path:
    """The directory of a small run."""
    from jgpt import ModelConfig, TrainConfig, fit

    config = TrainConfig(
        model=ModelConfig(block_size=8, num_layers=1, num_heads=2, embed_dim=4),
        dataset=text_of(root),
        out=str(root / "run"),
        steps=2,
        batch_size=2,
        eval_interval=2,
        sample_tokens=0,
    )
    return fit(config).directory


def files_of_a_run(root: Path, pattern: str, **options: Any) -> Target:
    from jgpt.runs.load import load

    run = trained(root)
    files = sorted(path for path in run.glob(pattern) if path.is_file())
    return Target(files, lambda: load(run), **options)


def tokenizer_json(root: Path) -> Target:
    from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer
    from jgpt.data.tokenizers import tokenizer_from_json

    tokenizers = {
        root / "characters.json": CharTokenizer.from_text(LINE),
        root / "bytes.json": ByteTokenizer(),
        root / "pairs.json": BPETokenizer.train([LINE] * 20, 270),
    }
    for path, tokenizer in tokenizers.items():
        path.write_text(tokenizer.to_json())
    files = list(tokenizers)

    def load() -> None:
        for file in files:
            tokenizer = tokenizer_from_json(file.read_text(encoding="utf-8"))
            tokenizer.decode(tokenizer.encode("the lazy"))

    return Target(files, load)


def token_files(root: Path) -> Target:
    from jgpt import DataConfig
    from jgpt.data.dataset import load_dataset, prepare

    folder = root / "prepared"
    prepare(text_of(root), folder)
    config = DataConfig(data=(str(folder),))
    return Target(sorted(folder.iterdir()), lambda: load_dataset(config, 8))


def safetensors(root: Path) -> Target:
    from flax import nnx

    import jgpt

    folder = root / "gpt2"
    config = jgpt.ModelConfig(
        vocab_size=11,
        block_size=8,
        num_layers=1,
        num_heads=2,
        embed_dim=4,
        # as GPT-2 has it: its format has no other
        activation="gelu_tanh",
        qkv_bias=True,
        use_bias=True,
    )
    jgpt.save_hf(jgpt.GPT(config, rngs=nnx.Rngs(0)), folder)
    return Target(sorted(folder.iterdir()), lambda: jgpt.load_hf(folder))


def metrics_jsonl(root: Path) -> Target:
    from jgpt.runs.directory import RunDirectory

    path = trained(root)

    def load() -> None:
        run = RunDirectory.open(path)
        for line in run.metrics():
            assert type(line["step"]) is int
            assert all(abs(float(value)) < 1e300 for value in line.values())
        run.provenance()

    files = [path / "metrics.jsonl", path / "provenance.jsonl"]
    return Target(files, load, faults=FAULTS)


def forge_around(file: Path) -> None:
    """Forge the manifest of the checkpoint that the file is in."""
    for folder in file.parents:
        if (folder / "manifest.json").exists():
            forge(folder)
            return
    raise FileNotFoundError(f"{file} is in no checkpoint")


COMMAND_LINES = (
    "train tiny --steps 5 --learning-rate 0.1 --dropout 0.1 --data missing.txt --out x --resume",
    "train nanogpt-char --embed-dim 24 --num-heads 6 --num-kv-heads 3 --positions rotary --dry-run",
    "train --optimizer muon --schedule wsd --no-tie-embeddings --ngram-sizes 2 4 --ngram-rows 19",
    "sample nowhere --prompt a --prompt b --top-k 3 --top-p 0.5 --stop x --seed 7 --checkpoint 3",
    "eval nowhere --json --checkpoint last",
    "info nowhere",
    "prepare missing.txt --tokenizer bpe --bpe-vocab-size 300 --out x",
    "import nowhere --from nanogpt --tokenizer missing.txt --out x",
    "export nowhere --out x --zero-biases",
    "plot nowhere nothing --out x.png",
    "attention nowhere --prompt a --out x.png",
    "presets",
)


def command_lines(root: Path) -> Target:
    """Options as a JSON list, or as words where the mutations left no JSON."""
    originals: dict[Path, bytes] = {}
    for index, line in enumerate(COMMAND_LINES):
        path = root / f"{index}.json"
        originals[path] = json.dumps(line.split()).encode()
        path.write_bytes(originals[path])

    def load() -> None:
        for path, content in originals.items():
            data = path.read_bytes()
            if data == content:
                continue
            words = parsed(data)
            if not isinstance(words, list):
                words = data.decode("latin-1").split()
            run_command(words)

    os.chdir(root)
    return Target(list(originals), load, opens_anything=True)


def config_option(root: Path) -> Target:
    path = trained(root) / "config.json"
    return Target([path], lambda: run_command(["train", "--config", path]))


def run_command(words: list[Any]) -> None:
    """Run a command up to where it would train. Raises ValueError if it was rejected properly."""
    from jgpt.cli import main as jgpt
    from jgpt.fitting import fit as fit_module

    def valid(*_: Any, **__: Any) -> None:
        raise ValueError("valid")

    fit_module.fit = valid
    fit_module.plan = valid
    complained = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complained):
        try:
            jgpt([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
    lines = complained.getvalue().splitlines()
    rejected = code == 2 and len(lines) == 1 and lines[0].startswith("jgpt: ")
    assert rejected or (code == 0 and not lines), (code, lines, words)
    if rejected and lines != ["jgpt: valid"]:
        raise ValueError(lines[0])


CHECKPOINT = "checkpoints/2"
"""The early checkpoint is not loaded."""
TARGETS: dict[str, Callable[[Path], Target]] = {
    "tokenizer.json": tokenizer_json,
    "tokens": token_files,
    "metrics.jsonl": metrics_jsonl,
    "checkpoint": partial(
        files_of_a_run, pattern=f"{CHECKPOINT}/**/*", detects_all=True, faults=FAULTS
    ),
    "config.json": partial(files_of_a_run, pattern="config.json", faults=FAULTS),
    "safetensors": safetensors,
    "forged checkpoint": partial(
        files_of_a_run, pattern=f"{CHECKPOINT}/weights/**/*", repair=forge_around
    ),
    "options": command_lines,
    "train --config": config_option,
}
