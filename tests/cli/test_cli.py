"""The command as a user types it: what works, and one clear line for what doesn't."""

import dataclasses
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest

from jgpt import save_hf
from jgpt.cli import main
from jgpt.cli.commands import COMMANDS
from jgpt.cli.options import TRAIN, in_options, parse
from jgpt.generation.text import stream_text
from jgpt.parallel.mesh import current_mesh
from jgpt.runs.directory import RunDirectory
from jgpt.runs.evaluate import evaluate
from jgpt.runs.load import load
from tests.commands import on_terminal, refused, typist, worked
from tests.generation.test_chat import chat_run
from tests.models import random_gpt
from tests.runs.harness import contents

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(trained) -> Path:
    return trained.path


FILES = {
    "short.txt": b"too short",
    "folder/notes.txt": b"mine",
    "model/config.json": b'{"model_type": "gpt2"}',
}


def cases_of(name: str) -> list[tuple[str, str]]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return re.findall(r"^\$ jgpt (.*)\n(.*)", text, re.MULTILINE)


@pytest.fixture
def folder(run, text_file, tmp_path) -> Path:
    """What a user has: a run, a text, and much that is neither."""
    (tmp_path / "trained").symlink_to(run)
    files = {"fox.txt": text_file.read_bytes()} | FILES
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize(("line", "expected"), cases_of("refusals.txt"))
def test_a_rejection_is_one_line_and_changes_nothing(line, expected, run, folder):
    """One of each kind, and one for each way from where it is raised to the terminal."""
    before = contents(folder), contents(run)
    shown = refused(*shlex.split(line), cwd=folder)

    assert shown.replace(f"{folder}/", "") == expected
    assert (contents(folder), contents(run)) == before


@pytest.mark.parametrize(("line", "expected"), cases_of("rejected_options.txt"))
def test_options_that_do_not_fit_are_rejected_before_anything_is_read(
    line, expected, folder, monkeypatch
):
    """What the command itself rejects: its functions are called, without a terminal."""
    monkeypatch.chdir(folder)
    name, *words = shlex.split(line)
    command = COMMANDS[name]
    with pytest.raises((ValueError, OSError)) as rejection:
        command(**parse(command, name, words))
    names = set(inspect.signature(command).parameters)
    message = in_options(str(rejection.value), TRAIN if name == "train" else names)
    assert f"jgpt: {message}" == expected


@pytest.mark.slow
def test_commands_import_jax_when_they_need_it_and_show_that_they_do(data_directory, tmp_path):
    """A text is prepared without it, and no help needs it."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 4000)  # long enough for tiktoken
    files = ["--tokenizer", "gpt2", "--tokenizer-files", str(data_directory / "gpt2-bpe")]
    command = ["prepare", str(text), "--out", str(tmp_path / "out"), *files]
    code = (
        "import sys, jgpt.cli\n"
        "jgpt.cli.main(['--help'])\n"
        "assert 'importlib.metadata' not in sys.modules\n"  # half of what `import jgpt` took
        f"jgpt.cli.main({command!r})\n"
        "assert not {'jax', 'flax', 'matplotlib'} & set(sys.modules)\n"
        "import jgpt.cli.terminal as terminal\n"
        "terminal.importing = lambda: sys.exit('jax' in sys.modules)\n"
        "for line in ('train tiny', 'train --steps 3', 'train tiny --dry-run',\n"
        "    'sample r', 'chat r', 'eval r', 'info tiny', 'shapes tiny',\n"
        "    'plot r', 'look r --prompt a',\n"
        "    'import s', 'export r'):\n"
        "    name, *options = line.split()\n"
        "    try: jgpt.cli.main([name, *options])\n"
        "    except SystemExit as stop: assert stop.code is False, line\n"
        "    else: raise AssertionError(line)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


IN_A_PROCESS = {
    "train": ["tiny", "--steps", 2, "--eval-interval", 2, "--sample-tokens", 0, "--out", "again"],
    "sample": ["trained", "--prompt-file", "-", "--max-new-tokens", 5, "--temperature", 0],
    "chat": ["chatty", "--max-new-tokens", 5],
    "eval": ["trained", "--json"],
    "info": ["trained"],
    "shapes": ["trained", "--depth", 1],
    "new": ["my_gpt.py"],
    "plot": ["trained", "--out", "losses.png"],
    "look": ["trained", "--prompt", "So long", "--max-new-tokens", 3],
    "prepare": ["fox.txt", "--out", "prepared"],
    "import": ["gpt2", "--tokenizer", "fox.txt", "--out", "imported"],
    "export": ["exportable", "--out", "exported"],
}


@pytest.mark.slow
def test_every_command_works_in_a_process_that_tests_have_not_set_up(run, text_file, tmp_path):
    """All else that tests type runs in theirs, which has imported and set up a lot already."""
    assert {*IN_A_PROCESS} == {*COMMANDS}
    shutil.copytree(run, tmp_path / "trained")
    shutil.copy(text_file, tmp_path)
    chat_run(tmp_path / "chatty", block_size=64)
    save_hf(random_gpt("gpt2", vocab_size=len(set(TEXT))), tmp_path / "gpt2")
    worked("import", *IN_A_PROCESS["import"][:-1], "exportable", cwd=tmp_path)
    with typist(tmp_path) as type_in:
        for command in IN_A_PROCESS:
            done = type_in(command, *IN_A_PROCESS[command], stdin="So long")
            assert (done.code, done.stderr) == (0, ""), command
            assert done.stdout, command


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "full", "code", "said"),
    [
        (["train", "--help-all"], False, 141, b""),  # as of `| head -1`
        (["help"], False, 141, b""),
        (["help"], True, 2, b"jgpt: No space left on device\n"),
    ],
)
def test_a_reader_that_leaves_is_no_error_and_a_full_disk_is_one_line(arguments, full, code, said):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as device, open(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "jgpt", *arguments],
            stdout=device if full else pipe,
            stderr=subprocess.PIPE,
            check=False,
        )

    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("line", ["train tiny", "sample r", "eval r", "info tiny"])
def test_a_platform_that_jax_does_not_have_gets_one_line(line, monkeypatch, tmp_path):
    monkeypatch.setattr("jax.devices", mock.Mock(side_effect=AssertionError()))
    said = refused(*line.split(), cwd=tmp_path)
    assert said == (
        f"jgpt: JAX can't use JAX_PLATFORMS={jax.config.jax_platforms} on this machine: "  # type: ignore[attr-defined]
        "unset it, or set it to cpu"
    )


def test_too_little_memory_is_one_line(text_file, tmp_path, monkeypatch):
    failure = MemoryError("Unable to allocate 60 bytes")
    monkeypatch.setattr("jgpt.data.prepared.encode_each", mock.Mock(side_effect=failure))
    said = refused("train", "tiny", "--data", text_file, cwd=tmp_path)

    assert said == (
        "jgpt: the memory is too small (Unable to allocate 60 bytes): free some, or take a smaller "
        "model or text"
    )
    assert not (tmp_path / "runs").exists()


def test_training_stops_with_a_checkpoint_when_nobody_reads_its_output(
    text_file, tmp_path, monkeypatch, capfd
):
    """As in `jgpt train ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    train = ("train", "bigram", "--data", text_file, "--out", tmp_path / "a")
    endless = ("--steps", 1_000_000, "--eval-interval", 1_000_000, "--sample-tokens", 0)
    with open(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in (*train, *endless)])
        monkeypatch.undo()
    assert stopped.value.code == 141
    (step,) = RunDirectory(tmp_path / "a").checkpoint_steps()[-1:]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "jgpt: the output was closed:",
        f"stopped after step {step}; its checkpoint is in {tmp_path / 'a'}",
        f"resume with: jgpt train --out {tmp_path / 'a'} --resume",
    ]


SAMPLE = ("--max-new-tokens", 12, "--prompt")
GREEDY = ("--temperature", 0, *SAMPLE)


def test_sample_continues_the_prompt_and_a_seed_repeats_it(run):
    ask = ("sample", run, *SAMPLE, "So lo", "--seed", 7)
    first = worked(*ask)

    assert first.startswith("So lo")
    assert len(first.removesuffix("\n")) == len("So lo") + 12
    assert worked(*ask, "--temperature", 0.8) == first
    assert worked(*ask[:-1], 8) != first
    assert worked(*ask, "--temperature", 1.8) != first


def test_sample_continues_several_prompts_side_by_side_up_to_a_stop_string(run):
    both = worked("sample", run, *GREEDY, "So long", "--prompt", "eyes", "--num-samples", 2)
    so, eyes = (worked("sample", run, *GREEDY, prompt) for prompt in ("So long", "eyes"))
    assert both == "---------------\n".join([so, so, eyes, eyes])
    stop = so[10:13]
    said = worked("sample", run, *GREEDY, "So long", "--stop", "no such text", "--stop", stop)
    assert said == so[: so.index(stop, 7)] + "\n"


def test_control_characters_are_shown_as_pictures(tmp_path):
    said = refused("train", "--resume", "--out", "a\x1b[31m\x9b\a", cwd=tmp_path)
    assert "a␛[31m�␇ is not a run" in said


def test_a_terminal_gets_no_control_characters_from_a_text(text_file, tmp_path):
    """Of a run of bytes, which can be any character."""
    given = ("--data", text_file, "--tokenizer", "byte", "--out", tmp_path, "--sample-tokens", 0)
    worked("train", "bigram", *given, "--steps", 1)
    ask = ("sample", tmp_path, "--prompt", "dog\r\nthe", "--max-new-tokens", 0)
    code, shown = on_terminal(80, *ask)

    assert code == 0
    assert shown.endswith("dog␍\r\nthe\r\n")  # a terminal's own \r before each \n
    assert worked(*ask) == "dog\r\nthe\n"


@pytest.mark.slow
def test_a_prompt_file_is_a_file(run, tmp_path):
    """Or standard input, read as a text is."""
    windows = b"\xef\xbb\xbfthis\r\neye"
    (tmp_path / "prompt.txt").write_bytes(windows)
    from_file = ("--temperature", 0, "--max-new-tokens", 12, "--prompt-file")
    said = worked("sample", run, *from_file, tmp_path / "prompt.txt")
    assert said == worked("sample", run, *from_file, "-", stdin=windows)
    assert said == worked("sample", run, *GREEDY, "this\neye")
    said = refused("sample", run, "--prompt-file", "-", stdin=b"caf\xe9")
    assert "standard input is not UTF-8 text" in said


@pytest.mark.slow
def test_sample_writes_more_texts_than_go_side_by_side(run, monkeypatch):
    monkeypatch.setattr("jgpt.cli.commands.sample.BATCH_SIZE", 2)
    said = worked("sample", run, *SAMPLE, "the", "--num-samples", 3)
    texts = said.removesuffix("\n").split("\n---------------\n")
    assert all(text.startswith("the") and len(text) == 15 for text in texts)
    assert len(set(texts)) == len(texts) == 3


def test_eval_prints_what_was_measured(trained):
    found = evaluate(trained.path)
    run = trained.path
    assert found.loss == pytest.approx(trained.validation_loss, rel=1e-6)
    lines = worked("eval", run).splitlines()
    said = [float(re.findall(r"\d[\d.]*", line)[0]) for line in lines]
    expected = (found.loss, found.perplexity, found.bits_per_character)
    assert said == pytest.approx(expected, abs=6e-4)
    assert f" {found.tokens:,} " in lines[0]
    assert json.loads(worked("eval", run, "--json")) == dataclasses.asdict(found)


@pytest.mark.slow
def test_a_mesh_samples_and_evaluates_alike(trained, monkeypatch):
    said = []
    meshes = []

    def heard(call):
        def wrapper(*arguments, **options):
            meshes.append(dict(current_mesh().shape))
            return call(*arguments, **options)

        return wrapper

    monkeypatch.setattr("jgpt.runs.load.load", heard(load))
    monkeypatch.setattr("jgpt.generation.text.stream_text", heard(stream_text))
    monkeypatch.setattr("jgpt.runs.evaluate.evaluate", heard(evaluate))
    for mesh in ((), ("--mesh", "data=2,fsdp=2,tensor=2")):
        ask = (trained.path, *mesh)
        text = worked("sample", *ask, "--max-new-tokens", 9, "--temperature", 0)
        said.append((text, json.loads(worked("eval", *ask, "--json"))))
    assert meshes == [{}] * 3 + [{"data": 2, "fsdp": 2, "tensor": 2}] * 3
    (text, alone), (same, together) = said
    assert text == same
    assert alone["tokens"] == together["tokens"]
    assert alone["loss"] == pytest.approx(together["loss"], rel=1e-6)
