"""Models of the Hugging Face hub by name: JSON, safetensors and byte-pairs, never code."""

import errno
import re
from pathlib import Path
from typing import Any

from jgpt.config import did_you_mean
from jgpt.durable import prefix_errors
from jgpt.interop.huggingface import HF_CONFIG, HF_INDEX, HF_WEIGHTS
from jgpt.interop.names import read_json

HUB = {
    "gpt2": "openai-community/gpt2",
    "smollm2": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-chat": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3": "Qwen/Qwen3-0.6B",
}
"""Short names of repositories."""
SMALL = [HF_CONFIG, "generation_config.json", HF_INDEX, "tokenizer.json", "tokenizer_config.json"]
SMALL += ["vocab.json", "merges.txt"]
WEIGHTS = [HF_WEIGHTS, "model-*-of-*.safetensors"]


def find_model(source: str) -> Path:
    """The folder of a model: the source itself, or fetched for `hub:OWNER/NAME` or a short name.

    Raises ValueError for any other source, and what `fetch` raises.
    """
    if source.startswith("hub:"):
        return fetch(source.removeprefix("hub:"))
    if Path(source).exists():
        return Path(source)
    if source in HUB:
        return fetch(HUB[source])
    raise ValueError(
        f"there is no folder {source}{did_you_mean(source, HUB)}: give one with {HF_CONFIG} and "
        f"{HF_WEIGHTS}, or from the hub hub:OWNER/NAME, {', '.join(HUB)}"
    )


def fetch(repository: str) -> Path:
    """The folder of a repository in the hub's cache, fetched if it isn't there.

    Raises ValueError for a repository that needs code or has no safetensors, and OSError if it
    can't be reached.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"hub:{repository} must be hub:OWNER/NAME")
    folder = _snapshot(repository, SMALL)
    for name in (HF_CONFIG, "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        with prefix_errors(Path(repository) / name):
            values = read_json(folder / name)
        if values.get("auto_map"):
            raise ValueError(
                f"{repository} needs code of its own, by auto_map in {name}: code is never "
                "fetched or run"
            )
    _snapshot(repository, WEIGHTS, revision=folder.name)
    if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        raise ValueError(
            f"{repository} has no {HF_WEIGHTS}: other formats can run code when they are read, "
            "and are never fetched"
        )
    return folder


def _snapshot(repository: str, files: list[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()  # several lines, where a spinner is shown
    logging.set_verbosity_error()
    try:
        return Path(snapshot_download(repository, allow_patterns=files, **options))
    except GatedRepoError:
        reason = f"accept its terms at https://huggingface.co/{repository}, then run: hf auth login"
        raise OSError(f"{repository} is gated: {reason}") from None
    except RepositoryNotFoundError:
        raise OSError(f"the hub has no public model {repository}") from None
    except Exception as error:  # of several libraries, for all that can happen to a network
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            raise OSError(f"{repository} can't be stored: {error}") from None
        raise OSError(
            f"{repository} can't be fetched ({type(error).__name__}). Without a network, copy "
            f"{HF_CONFIG}, {HF_WEIGHTS} and tokenizer.json from another machine into a folder, and "
            "give the folder"
        ) from None
