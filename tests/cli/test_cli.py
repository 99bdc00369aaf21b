"""The command as a user types it: what works, and one clear line for what doesn't."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import pytest

from jgpt import TrainConfig, generate_text, load, save_gpt2
from jgpt.cli import main
from jgpt.cli.commands import BATCH_SIZE, COMMANDS
from jgpt.cli.terminal import importing
from jgpt.runs.bands import Band
from jgpt.runs.directory import RunDirectory
from jgpt.runs.loop import TrainingStopped
from tests.commands import jgpt, on_terminal, refused, worked
from tests.generation.test_chat import chat_run
from tests.models import random_gpt
from tests.quick import only

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SMALL = ("--steps", 30, "--eval-interval", 10, "--steps-per-call", 5, "--sample-tokens", 20)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def trained(text_file) -> Path:
    out = text_file.parent / "trained"
    said = worked("train", "tiny", "--data", text_file, "--out", out, *SMALL)
    assert "validation loss" in said
    assert f"jgpt sample {out}" in said
    return out


UNREADABLE = {
    "empty.txt": b"",
    "binary.txt": b"plain\0binary",
    "latin.txt": b"caf\xe9 au lait" * 100,
    "short.txt": b"too short",
    "brief.txt": b"a" * 100,
}
REFUSALS = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("line", "expected"), re.findall(r"^\$ jgpt (.*)\n(.*)", REFUSALS, re.M))
def test_a_refusal_is_one_line_and_changes_nothing(line, expected, trained, text_file, tmp_path):
    (tmp_path / "trained").symlink_to(trained)
    (tmp_path / "link").symlink_to("missing")
    files = {"fox.txt": text_file.read_bytes(), **UNREADABLE}
    files |= {"folder/notes.txt": b"mine", "model/config.json": b'{"model_type": "gpt2"}'}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    before = contents(tmp_path), contents(trained)
    assert refused(*shlex.split(line), cwd=tmp_path) == expected
    assert (contents(tmp_path), contents(trained)) == before


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A run of one's own, to break."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_help_is_instant_and_needs_no_jax():
    code = (
        "import sys, jgpt.cli\n"
        "try: jgpt.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_text_is_prepared_without_jax(data_directory, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 4000)  # long enough for tiktoken
    files = ["--tokenizer", "gpt2", "--tokenizer-files", str(data_directory / "gpt2-bpe")]
    command = ["prepare", str(text), "--out", str(tmp_path / "out"), *files]
    code = (
        "import sys, jgpt.cli\n"
        f"jgpt.cli.main({command!r})\n"
        "assert not {'jax', 'flax', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_commands_show_that_they_import_jax_before_they_do():
    code = (
        "import sys, jgpt.cli, jgpt.cli.commands as commands\n"
        "commands.importing = lambda: sys.exit('jax' in sys.modules)\n"
        "for line in ('train tiny', 'train --steps 3', 'plan tiny',\n"
        "    'sample r', 'chat r', 'eval r', 'info tiny', 'shapes tiny',\n"
        "    'plot r', 'attention r --prompt a', 'look r --prompt a',\n"
        "    'import s --out i', 'export r --out e'):\n"
        "    name, *options = line.split()\n"
        "    try: jgpt.cli.main([name, *options])\n"
        "    except SystemExit as stop: assert stop.code is False, line\n"
        "    else: raise AssertionError(line)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("frozen", "freezes"), [(0, 1), (7, 0)])
def test_what_is_imported_is_left_out_of_collections_once(monkeypatch, frozen, freezes):
    events = []
    monkeypatch.setattr("gc.get_freeze_count", lambda: frozen)
    monkeypatch.setattr("gc.freeze", lambda: events.append("frozen"))
    with importing():
        events.append("imported")
    assert events == ["imported"] + ["frozen"] * freezes


IN_A_PROCESS = {
    "train": ["tiny", "--steps", 2, "--eval-interval", 2, "--sample-tokens", 0, "--out", "again"],
    "plan": ["tiny", "--data", "fox.txt", "--block-size", 4],
    "sample": ["trained", "--prompt-file", "-", "--max-new-tokens", 5, "--temperature", 0],
    "chat": ["chatty", "--max-new-tokens", 5],
    "eval": ["trained", "--json"],
    "info": ["trained"],
    "shapes": ["trained", "--depth", 1],
    "new": ["my_gpt.py"],
    "plot": ["trained", "--out", "losses.png"],
    "attention": ["trained", "--prompt", "the lazy", "--out", "attention.png"],
    "look": ["trained", "--prompt", "the lazy", "--max-new-tokens", 3],
    "prepare": ["fox.txt", "--out", "prepared"],
    "import": ["gpt2", "--tokenizer", "fox.txt", "--out", "imported"],
    "export": ["imported", "--out", "exported"],
    "presets": [],
}


@pytest.mark.parametrize("command", only(["sample"], COMMANDS))
def test_every_command_works_in_a_process_of_its_own(command, trained, text_file, tmp_path):
    """All else that tests type runs in theirs, which has imported and set up a lot already."""
    shutil.copytree(trained, tmp_path / "trained")
    shutil.copy(text_file, tmp_path)
    if command == "chat":
        chat_run(tmp_path / "chatty", block_size=64)
    if command in ("import", "export"):
        save_gpt2(random_gpt("gpt2", vocab_size=len(set(TEXT))), tmp_path / "gpt2")
    if command == "export":
        worked("import", *IN_A_PROCESS["import"], cwd=tmp_path)
    options = map(str, IN_A_PROCESS[command])
    done = subprocess.run(
        [sys.executable, "-m", "jgpt.cli", command, *options],
        input=b"the quick",
        capture_output=True,
        cwd=tmp_path,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert done.stdout


def test_a_refusal_leaves_a_process_with_one_line_and_2():
    done = subprocess.run(
        [sys.executable, "-m", "jgpt.cli", "sample", "nowhere"], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"jgpt: nowhere is not a run directory: it has no config.json\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error there")
@pytest.mark.parametrize("arguments", [["presets"], ["train", "--help-all"], ["--help"]])
def test_a_reader_that_leaves_is_no_error(arguments):
    """As of `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jgpt.cli", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "jgpt.cli", "presets"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        b"jgpt: No space left on device\n",
    )


def test_only_the_echoes_of_a_failed_write_are_not_reported(monkeypatch):
    def complain() -> None:
        """Raise where nothing can catch it."""
        for message in ("Event loop is closed", "out of luck"):
            sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(message)))  # type: ignore[arg-type]

    reported: list = []
    monkeypatch.setattr(sys, "unraisablehook", hook := reported.append)
    monkeypatch.setitem(COMMANDS, "presets", complain)
    main(["presets"])
    assert [str(each.exc_value) for each in reported] == ["out of luck"]
    assert sys.unraisablehook == hook


def test_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setitem(COMMANDS, "presets", lambda: print("naïve Ω"))
    main(["presets"])
    assert output.getvalue() == b"na?ve ?\n"


def test_closed_streams_are_empty(monkeypatch, trained):
    """As after `<&- >&- 2>&-`, where Python has None."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    main(["presets"])
    with pytest.raises(SystemExit) as stopped:
        main(["sample", str(trained), "--prompt-file", "-"])
    assert stopped.value.code == 2
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


def test_a_help_in_very_few_columns_ends(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "5")
    main(["sample", "--help"])
    assert "--max-new-tokens N" in capsys.readouterr().out


@pytest.mark.parametrize("failure", [RuntimeError("no backend 'cuda'"), AssertionError()])
@pytest.mark.parametrize(
    "line",
    [
        *("train tiny", "sample r", "chat r", "eval r", "info tiny", "export r --out e"),
        *("attention r --prompt a", "look r --prompt a"),
    ],
)
def test_a_platform_that_jax_does_not_have_gets_one_line(line, failure, monkeypatch, tmp_path):
    monkeypatch.setattr("jax.devices", mock.Mock(side_effect=failure))
    said = refused(*line.split(), cwd=tmp_path)
    assert said == (
        f"jgpt: JAX can't use JAX_PLATFORMS={jax.config.jax_platforms} on this machine: "  # type: ignore[attr-defined]
        "unset it, or set it to cpu"
    )


def test_a_command_to_copy_is_quoted(text_file, tmp_path):
    out = tmp_path / "with space"
    said = worked("prepare", text_file, "--out", out)
    assert said.endswith(f"; next: jgpt train --data '{out}'\n")


def test_prepare_takes_its_texts_as_train_does(text_file, tmp_path):
    line = json.dumps({"body": text_file.read_text()})
    (tmp_path / "a.jsonl").write_text(line)
    named = ["--data", tmp_path / "a.jsonl", "--data-field", "body"]
    for name, data in {"a": [text_file], "b": ["--data", text_file], "c": named}.items():
        worked("prepare", *data, "--tokenizer", "byte", "--out", tmp_path / name)
    first, second, third = ((tmp_path / name / "tokens.bin").read_bytes() for name in "abc")
    assert bytes(first[::2]).decode() == text_file.read_text()
    assert second == first
    assert third == first + b"\n\0"
    assert "in a field 'text': name the field with --data-field NAME" in refused(
        "prepare", "--data", tmp_path / "a.jsonl", "--out", tmp_path / "d"
    )


def test_the_total_time_counts_the_imports_too(monkeypatch, tmp_path):
    seconds = iter([100.0, 114.2, 0.0, 1.0])
    monkeypatch.setattr("jgpt.cli.commands.time.perf_counter", lambda: next(seconds))
    run = types.SimpleNamespace(
        directory=tmp_path / "a run", sample="", validation_loss=1.23456, best_step=7
    )
    monkeypatch.setattr("jgpt.runs.loop.fit", lambda *_, **__: run)
    loss, directory, following = worked("train", "tiny").splitlines()
    assert loss == "validation loss 1.2346 at step 7, total time 14 s"
    assert directory.startswith(f"run directory: {run.directory} (")
    assert following == f"next: jgpt sample '{run.directory}'   or   jgpt eval '{run.directory}'"
    band = Band("tiny", TrainConfig(), "", (1.2, 1.3), {})
    monkeypatch.setattr("jgpt.runs.bands.band_of", {RunDirectory(run.directory): band}.get)
    _, placed, *_ = worked("train", "tiny").splitlines()
    assert placed == "that is within the 2 seeds of tiny, 1.200 to 1.300"


def test_a_run_that_was_stopped_says_how_to_resume_it(monkeypatch, tmp_path):
    def stopped(*_, **__):
        raise TrainingStopped(5, tmp_path / "a run")

    monkeypatch.setattr("jgpt.runs.loop.fit", stopped)
    monkeypatch.setattr("jgpt.cli.signals.StopRequest.exit_code", 130)
    done = jgpt("train", "tiny")
    assert done.code == 130
    resume = f"resume with: jgpt train --out '{tmp_path / 'a run'}' --resume"
    assert done.stdout.splitlines()[-1] == resume


def test_sample_continues_the_prompt_and_a_seed_repeats_it(trained):
    ask = ("sample", trained, "--prompt", "the quick", "--max-new-tokens", 40, "--seed", 7)
    first, second = worked(*ask), worked(*ask)
    assert first == second
    assert first.startswith("the quick")
    assert len(first.removesuffix("\n")) == len("the quick") + 40
    assert worked(*ask[:-1], 8) != first
    assert worked(*ask, "--temperature", 0.8) == first
    assert worked(*ask, "--temperature", 1.8) != first


def test_a_prompt_file_is_a_file(trained, tmp_path):
    """Or standard input, read as the run's text was."""
    windows = b"\xef\xbb\xbflazy\r\ndog"
    (tmp_path / "prompt.txt").write_bytes(windows)
    options = ("--max-new-tokens", 5, "--temperature", 0)
    said = worked("sample", trained, "--prompt-file", tmp_path / "prompt.txt", *options)
    assert said.startswith("lazy\ndog")
    assert said == worked("sample", trained, "--prompt-file", "-", *options, stdin=windows)
    for data, because in ((b"caf\xe9", "standard input is not UTF-8 text"), (b"", "is empty")):
        assert because in refused("sample", trained, "--prompt-file", "-", stdin=data)


def test_carriage_returns_are_newlines_and_that_is_said_once(text_file, tmp_path):
    (tmp_path / "notes").mkdir()
    for name in "ab":
        data = b"\xef\xbb\xbf" + text_file.read_bytes().replace(b"\n", b"\r\n")
        (tmp_path / "notes" / f"{name}.txt").write_bytes(data)
    brief = ("--steps", 1, "--eval-interval", 1, "--sample-tokens", 0)
    said = worked("train", "bigram", "--data", tmp_path / "notes", "--out", tmp_path / "a", *brief)
    line = "a.txt and 1 more: carriage returns are read as newlines and byte-order marks dropped"
    assert said.count(line) == said.count("carriage returns") == 1
    assert "step 0: validation loss about " in said
    vocabulary = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["characters"]
    assert vocabulary == "".join(sorted(set(TEXT)))
    keep = ("--no-universal-newlines", "--out")
    said = worked("train", "bigram", "--data", tmp_path / "notes", *brief, *keep, tmp_path / "b")
    assert "carriage returns" not in said
    vocabulary = json.loads((tmp_path / "b" / "tokenizer.json").read_text())["characters"]
    assert vocabulary == "".join(sorted({*TEXT, "\r", "\ufeff"}))
    said = worked("prepare", tmp_path / "notes", "--out", tmp_path / "c")
    assert said.count(line) == 1
    assert "carriage returns" not in worked("prepare", tmp_path / "notes", *keep, tmp_path / "d")


def test_only_weights_in_int8_are_quantised(trained, monkeypatch, capsys):
    """Both texts may be the same: so here what is quantised becomes another model."""
    model, tokenizer, _ = load(trained)
    other = random_gpt("gpt2", vocab_size=model.vocab_size)
    monkeypatch.setattr("jgpt.nn.int8.with_int8_weights", lambda _: other)
    rules = {"key": jax.random.key(0), "temperature": 0.0}
    texts = [generate_text(each, tokenizer, ("",), 9, **rules)[0] for each in (model, other)]
    assert texts[0] != texts[1]
    for weights, text in zip(("saved", "int8"), texts, strict=True):
        options = ["--weights", weights, "--max-new-tokens", "9", "--temperature", "0"]
        main(["sample", str(trained), *options])
        assert capsys.readouterr().out == text + "\n"


def test_sample_continues_several_prompts_side_by_side(trained):
    ask = ("sample", trained, "--max-new-tokens", 12, "--temperature", 0)
    both = worked(*ask, "--prompt", "the quick", "--prompt", "lazy", "--num-samples", 2)
    the, lazy = (worked(*ask, "--prompt", prompt) for prompt in ("the quick", "lazy"))
    assert both == "---------------\n".join([the, the, lazy, lazy])


def test_sample_writes_more_texts_than_go_side_by_side(trained):
    said = worked("sample", trained, "--prompt", "the", "--max-new-tokens", 9, "--num-samples", 18)
    texts = said.removesuffix("\n").split("\n---------------\n")
    assert len(texts) == 18
    assert all(text.startswith("the") and len(text) == 12 for text in texts)
    assert len(set(texts)) > 9


def test_sample_begins_before_all_prompts_are_made(trained, monkeypatch):
    def few(number):
        yield from [number] * BATCH_SIZE
        raise AssertionError("more than go side by side")

    monkeypatch.setattr("jgpt.cli.commands.range", few, raising=False)
    monkeypatch.setattr("jgpt.generation.text.stream_text", mock.Mock(side_effect=ValueError("go")))
    assert refused("sample", trained, "--num-samples", 10**12) == "jgpt: go"


def test_sample_ends_at_the_first_stop_string(trained):
    ask = ("sample", trained, "--prompt", "the", "--max-new-tokens", 40, "--temperature", 0)
    whole = worked(*ask).removesuffix("\n")
    stop = whole[20:23]
    assert stop not in whole[3:20]
    said = worked(*ask, "--stop", "no such text", "--stop", stop)
    assert said == whole[: whole.index(stop, 3)] + "\n"


def test_eval_agrees_with_the_metrics(trained):
    measured = json.loads(worked("eval", trained, "--json"))
    lines = [line for line in metrics(trained) if "validation_loss" in line]
    best = min(line["validation_loss"] for line in lines)
    assert measured["loss"] == pytest.approx(best, rel=1e-6)
    assert measured["tokens"] == len(TEXT) - int(len(TEXT) * 0.9) - 1
    assert f"{best:.4f}" in worked("eval", trained)


def test_presets_are_wrapped_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    main(["presets"])
    assert max(map(len, terminal.getvalue().splitlines())) <= 50


def test_info_counts_the_parameters_of_a_run(trained):
    assert f"{len(set(TEXT)) * 32:,} parameters" in " ".join(worked("info", trained).split())


def test_a_config_may_have_a_byte_order_mark(run):
    path = run / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as an editor leaves it
    assert "validation loss" in worked("eval", run)


@pytest.mark.parametrize("tokenizer", only(["bpe"], ["char", "byte", "bpe"]))
def test_prepared_text_trains_like_the_text_itself(text_file, tmp_path, tokenizer):
    prepared = tmp_path / "prepared"
    how = ("--tokenizer", tokenizer, "--bpe-vocab-size", 260)
    assert f"jgpt train --data {prepared}" in worked("prepare", text_file, *how, "--out", prepared)
    small = ("--steps", 4, "--eval-interval", 4, "--sample-tokens", 0, "--block-size", 8)
    worked("train", "tiny", "--data", prepared, "--out", tmp_path / "a", *small)
    worked("train", "tiny", "--data", text_file, *how, "--out", tmp_path / "b", *small)
    losses = [[line.get("loss") for line in metrics(tmp_path / name)] for name in "ab"]
    assert losses[0] == losses[1]


def test_resume_needs_only_the_directory(run):
    said = worked("train", "--out", run, "--resume", "--steps", 40)
    assert "resumed at step 30 of 40" in said
    assert json.loads((run / "config.json").read_text())["steps"] == 40


def test_resume_says_that_a_run_is_finished(run):
    said = worked("train", "--out", run, "--resume")
    assert f"finished at step 30 of 30 already: {run}; --steps trains it further" in said


def test_overwrite_starts_again(run, text_file):
    said = worked(
        *("train", "tiny", "--data", text_file, "--out", run, "--overwrite", *SMALL),
        *("--steps", 9),
    )
    assert "resumed" not in said
    assert [line["step"] for line in metrics(run)][-1] == 9


def test_control_characters_are_shown_as_pictures(tmp_path):
    said = refused("train", "--resume", "--out", "a\x1b[31m\x9b\a", cwd=tmp_path)
    assert "a␛[31m�␇ is not a run" in said


@pytest.fixture(scope="module")
def two(trained, text_file) -> Path:
    """A run whose best and last checkpoint are of different weights, of a text with CR LF."""
    out = text_file.parent / "two"
    data = out.with_suffix(".txt")
    data.write_bytes(text_file.read_bytes().replace(b"\n", b"\r\n"))
    worked(
        *("train", "bigram", "--data", data, "--no-universal-newlines", "--out", out),
        *("--steps", 2, "--eval-interval", 1, "--sample-tokens", 0, "--learning-rate", 5),
    )
    return out


@pytest.mark.parametrize(
    "command",
    [
        ("sample", "--max-new-tokens", 3),
        ("chat",),
        ("attention", "--prompt", "the", "--out", "a.png"),
        ("look", "--prompt", "the"),
        ("export", "--out", "exported", "--zero-biases"),
        ("eval",),
    ],
    ids=lambda command: command[0],
)
def test_the_checkpoint_that_is_asked_for_is_the_one_that_is_read(
    command, trained, monkeypatch, tmp_path
):
    asked = []

    def read(run, which="best", **_):
        asked.append(which)
        raise ValueError("read")

    monkeypatch.setattr("jgpt.runs.checkpoints.load", read)
    monkeypatch.setattr("jgpt.runs.loop.evaluate", read)
    name, *options = command
    for given in ("best", "last", "30"):
        ask = (name, trained, *options, "--checkpoint", given)
        assert refused(*ask, cwd=tmp_path) == "jgpt: read"
    refused(name, trained, *options, cwd=tmp_path)
    assert asked == ["best", "last", 30, "best"]


def test_a_prompt_file_is_read_as_the_text_of_the_run_was(two, trained, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"dog\r\nthe")
    ask = ("--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 0)
    assert worked("sample", two, *ask) == "dog\r\nthe\n"
    assert worked("sample", trained, *ask) == "dog\nthe\n"


def test_a_terminal_gets_no_control_characters_from_a_text(two):
    ask = ("sample", two, "--prompt", "dog\r\nthe", "--max-new-tokens", 0)
    code, shown = on_terminal(80, *ask)
    assert code == 0
    assert shown.endswith("dog␍\r\nthe\r\n")  # a terminal's own \r before each \n
    assert worked(*ask) == "dog\r\nthe\n"


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limits there")
@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        ("plot", "--out", "losses.png"),
        ("attention", "--prompt", "the", "--out", "attention.png"),
        ("look", "--prompt", "the", "--out", "look.html"),
    ],
    ids=lambda command: command[0],
)
def test_a_file_that_cannot_be_written_is_named_and_the_earlier_one_stays(
    command, earlier, trained, tmp_path
):
    import resource

    (name, *options), file = command, tmp_path / command[-1]
    worked(name, trained, *options, cwd=tmp_path)  # compiles what is kept in files, too
    if earlier:
        file.write_bytes(b"of yesterday")
    else:
        file.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        said = refused(name, trained, *options, cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == f"jgpt: {command[-1]} can't be written: File too large"
    assert [*tmp_path.iterdir()] == [file] * earlier
    assert not earlier or file.read_bytes() == b"of yesterday"
