"""Kill `jgpt prepare` and a first training with SIGKILL while they tokenize, and start them again.

    python benchmarks/kill_prepare.py --kills 60

Half of the kills are of the command, and half of `jgpt.load_dataset`, with which a training
begins. Each is killed at a random moment and started again until it ends by itself. Then the tokens
must be those of a process that was never killed, and nothing may lie beside them. At last, two
processes ask for one text at once, which must be tokenized once.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import runner
import tyro
from texts import write_code

PREPARE = "from jgpt.cli import main; main()"
LOAD = """
import sys
from jgpt import DataConfig, load_dataset
config = DataConfig((sys.argv[1],), tokenizer="bpe", bpe_vocab_size=300)
load_dataset(config, 8, warn=print)
"""


def main(kills: int = 60, seed: int = 0, size: int = 12_000_000) -> None:
    """Kill, start again and compare, and write a record.

    Args:
        kills: How many times to kill.
        seed: Decides when.
        size: The size of the text in bytes.
    """
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        text = place / "text.txt"
        write_code(text, size)
        result = {"kills": 0, "continued": 0, "finished": 0, "differing": 0, "left_over": 0}
        moments = random.Random(seed)
        for kind in ("prepare", "load"):
            for name, count in killed(place, text, kind, kills // 2, moments).items():
                result[name] += count
        result["tokenized_at_once"] = at_once(place, text)
    print(result)
    print(runner.write("kill_prepare", result))
    if result["differing"] or result["left_over"] or result["tokenized_at_once"] != 1:
        sys.exit(1)


def start(place: Path, text: Path, kind: str) -> subprocess.Popen:
    """Start the command, or what a training begins with."""
    words = [PREPARE, "prepare", text, "--out", place / "out" / "prepared"]
    words += ["--tokenizer", "bpe", "--bpe-vocab-size", 300]
    if kind == "load":
        words = [LOAD, text]
    environment = os.environ | {
        "XDG_CACHE_HOME": str(place / "out"),
        "PYTHONPATH": str(runner.ROOT),
    }
    command = [sys.executable, "-c", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def killed(
    place: Path, text: Path, kind: str, kills: int, moments: random.Random
) -> dict[str, int]:
    """Kill a program so many times, and compare what it writes with that of one without a kill."""
    out = place / "out"
    began = time.perf_counter()
    start(place, text, kind).communicate()
    seconds = time.perf_counter() - began
    expected = files_in(out)
    shutil.rmtree(out)
    found = {"kills": 0, "continued": 0, "finished": 0, "differing": 0, "left_over": 0}
    while found["kills"] < kills or out.exists():
        process = start(place, text, kind)
        if found["kills"] < kills:
            try:
                process.wait(moments.uniform(0.2, 1) * seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                found["kills"] += 1
        said, _ = process.communicate()
        found["continued"] += "continuing after" in said
        # A kill may come after the folder has got its name.
        if process.returncode == 0 or (out / "prepared" / "dataset.json").exists():
            files = files_in(out)
            found["finished"] += 1
            found["left_over"] += files.keys() != expected.keys()
            found["differing"] += any(files.get(name) != data for name, data in expected.items())
            shutil.rmtree(out)
    return found


def files_in(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def at_once(place: Path, text: Path) -> int:
    """Return how many of two processes have tokenized a text that both ask for."""
    processes = [start(place, text, "load") for _ in range(2)]
    said = [process.communicate()[0] for process in processes]
    return 2 - sum("waiting for it" in text for text in said)


if __name__ == "__main__":
    tyro.cli(main)
