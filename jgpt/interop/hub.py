"""Models of the Hugging Face hub by name: JSON, safetensors and byte-pairs, never code."""

import re
from pathlib import Path
from typing import Any

from jgpt.files import prefix_errors, read_json
from jgpt.interop.huggingface import HF_INDEX, HF_WEIGHTS
from jgpt.interop.text_files import HF_CONFIG, OF_THE_MODEL, OF_THE_TOKENIZER
from jgpt.words import did_you_mean

HUB = {
    "gpt2": "openai-community/gpt2",
    "smollm2": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-chat": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3": "Qwen/Qwen3-0.6B",
}
"""Short names of repositories."""
SMALL = [
    *OF_THE_MODEL,
    *OF_THE_TOKENIZER,
    HF_INDEX,
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
]
"""The files that are fetched first: a config that needs code is rejected before gigabytes are
fetched."""
WEIGHTS = [HF_WEIGHTS, "model-*-of-*.safetensors"]


def find_model(source: str) -> Path:
    """Return the folder of a model; fetch it for `hub:OWNER/NAME` or a short name.

    Raises ValueError for any other source that is not a folder, and the errors of `fetch`.
    """
    if source.startswith("hub:"):
        return fetch(source.removeprefix("hub:"))
    if Path(source).exists():
        return Path(source)
    if source in HUB:
        return fetch(HUB[source])
    raise ValueError(
        f"there is no folder {source}{did_you_mean(source, HUB)}: give a folder with {HF_CONFIG} "
        f"and {HF_WEIGHTS}, or a model of the hub: hub:OWNER/NAME, {', '.join(HUB)}"
    )


def fetch(repository: str) -> Path:
    """Return the folder of a repository in the hub's cache; fetch it if it isn't there.

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
    # The same commit, even if the repository has changed since.
    _snapshot(repository, WEIGHTS, revision=folder.name)
    weights: list[Path] = []
    for pattern in WEIGHTS:
        weights.extend(folder.glob(pattern))
    if not weights:
        raise ValueError(
            f"{repository} has no {HF_WEIGHTS}: other formats can run code when they are read, "
            "and are never fetched"
        )
    return folder


def _snapshot(repository: str, files: list[str], **options: Any) -> Path:
    # imported here, since most commands don't need the hub
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()  # their several lines would disturb the spinner
    logging.set_verbosity_error()
    try:
        return Path(snapshot_download(repository, allow_patterns=files, **options))
    except GatedRepoError:
        reason = f"accept its terms at https://huggingface.co/{repository}, then run: hf auth login"
        raise OSError(f"{repository} is gated: {reason}") from None
    except RepositoryNotFoundError:
        raise OSError(f"the hub has no public model {repository}: check the name") from None
    except Exception as error:  # errors of the network come from several libraries
        reason, *_ = str(error).splitlines() or [""]
        raise OSError(
            f"{repository} can't be fetched ({type(error).__name__}: {reason}). Without a "
            f"network, copy {HF_CONFIG}, {HF_WEIGHTS} and tokenizer.json from another machine into "
            "a folder, and give the folder"
        ) from None
