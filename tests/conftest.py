"""What all tests share: no GPU grabbed, nothing of the user's touched."""

import ctypes
import dataclasses
import gc
import os
import sys
import types
import warnings
from pathlib import Path

from tests.flags import FASTER_TO_COMPILE, known_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# programs of tests are small and run once: compiling them is what takes time
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit what their parent has set
    os.environ["XLA_FLAGS"] = " ".join(
        (*known_flags(FASTER_TO_COMPILE), os.environ.get("XLA_FLAGS", ""))
    )

# the workers have all cores between them: on arrays this small a second thread takes a tenth longer
# with XLA, and twenty times as long with PyTorch, all of it waiting
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# processes that tests start import this checkout, wherever they run
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)

import hypothesis
import jax
import pytest

GROWTH = 700_000_000
"""The bytes by which a worker may grow before it lets go of its programs.

Its imports alone, PyTorch among them, come to 1.4 GB: a limit of the whole once let go of all
programs after each of 300 tests, which then compiled theirs again. Two workers stay below 5 GB.
"""

LONGEST = (
    "test_notebooks",
    "test_documents",
    "test_processes",
    "test_mesh",
    "test_gpu_benchmark",
    "test_resume",
    "test_ladder",
    "test_inside",
    "test_proofs",
    "test_source",
    "test_step",
)

# so that what asks for "the" device can be seen to take another; commands that tests start have one
jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config: pytest.Config) -> None:
    """Compile each program once, for all workers, the commands that tests start and the next time.

    JAX_COMPILATION_CACHE_DIR names a folder that outlives this checkout.
    """
    if hasattr(config, "cache"):  # not under -p no:cacheprovider
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    gc.disable()  # while tests are imported: to look for garbage takes a third of that time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes, or one worker ends long after the other."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish() -> None:
    """Keep what imports have made out of the garbage collections of every run that is trained."""
    gc.collect()
    gc.freeze()
    # A trace makes many objects, of which few are garbage: looked for less often than after each
    # 700, the tests of tests/nn and tests/generation take a fifteenth less processor time.
    gc.set_threshold(20_000)
    gc.enable()


hypothesis.settings.register_profile("jgpt", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.load_profile("jgpt")


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """Let go of a module's compiled programs after it, which are most of a worker's memory.

    What is left are the modules that it has imported: later collections pass over them.
    """
    yield
    release_programs()
    gc.freeze()


@pytest.fixture(scope="session")
def settled() -> types.SimpleNamespace:
    """What a worker holds after it has last let go of its programs."""
    return types.SimpleNamespace(bytes=resident_bytes())


@pytest.fixture(autouse=True)
def programs_of_few_tests(settled):
    """And also within a module that compiles a great many."""
    yield
    if resident_bytes() > settled.bytes + GROWTH:
        release_programs()
        settled.bytes = resident_bytes()


def resident_bytes() -> int:
    """Return the memory of this process, or 0 where Linux doesn't say it."""
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def release_programs() -> None:
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch) -> Path:
    """An empty folder in place of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_: str(folder))
    return folder


@pytest.fixture
def broken_reads():
    """Collect what Orbax 0.12 leaves of a read that failed, before another test is blamed."""
    yield
    with warnings.catch_warnings(action="ignore"):  # a coroutine that was never awaited
        gc.collect()


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """Where tiny Shakespeare and GPT-2's vocabulary lie, if the machine has them."""
    directory = os.environ.get("JGPT_DATA_DIR")
    if not directory:
        pytest.skip("JGPT_DATA_DIR is not set")
    return Path(directory)


@pytest.fixture(scope="session")
def shakespeare(data_directory) -> str:
    return (data_directory / "tinyshakespeare.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def poem(tmp_path_factory) -> Path:
    """A text to learn by heart, long enough for both splits."""
    path = tmp_path_factory.mktemp("text") / "poem.txt"
    path.write_text("So long as men can breathe or eyes can see,\nSo long lives this.\n" * 30)
    return path


@pytest.fixture(scope="session")
def small_run(poem):
    """The config of a run of seconds: eleven steps in calls of three, four evaluations."""
    from jgpt import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

    return TrainConfig(
        model=ModelConfig(block_size=7, num_layers=1, num_heads=2, embed_dim=12, dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=3),
        dataset=DataConfig(data=(str(poem),)),
        steps=11,
        batch_size=5,
        eval_interval=4,
        steps_per_call=3,
        sample_tokens=13,
        seed=2**32 - 1,
    )


@pytest.fixture(scope="session")
def trained(small_run, tmp_path_factory):
    """That run, uninterrupted. Tests that change its directory work on a copy."""
    from jgpt import fit

    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    return fit(dataclasses.replace(small_run, out=str(out)))
