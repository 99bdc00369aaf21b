"""Models of the Hugging Face hub by name: JSON, safetensors and byte-pairs, never code."""

import errno
import re
from pathlib import Path
from typing import Any

from jgpt.durable import prefix_errors, read_json
from jgpt.interop.huggingface import HF_INDEX, HF_WEIGHTS
from jgpt.interop.text_files import HF_CONFIG, MORE_TEMPLATES, OF_THE_MODEL, OF_THE_TOKENIZER
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
    f"{MORE_TEMPLATES}/*.jinja",
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
    _check_answers()
    try:
        return Path(snapshot_download(repository, allow_patterns=files, **options))
    except ForgedName as error:
        raise ValueError(f"{repository} is not fetched: the server sent {error}") from None
    except GatedRepoError:
        reason = f"accept its terms at https://huggingface.co/{repository}, then run: hf auth login"
        raise OSError(f"{repository} is gated: {reason}") from None
    except RepositoryNotFoundError:
        raise OSError(f"the hub has no public model {repository}: check the name") from None
    except Exception as error:  # network errors come from several libraries
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            raise OSError(f"{repository} can't be stored: {error}") from None
        raise OSError(
            f"{repository} can't be fetched ({type(error).__name__}). Without a network, copy "
            f"{HF_CONFIG}, {HF_WEIGHTS} and tokenizer.json from another machine into a folder, and "
            "give the folder"
        ) from None


class ForgedName(Exception):
    """A server's answer that would name a file outside the cache."""


def _check_answers() -> None:
    """Make the hub's library check the names in each answer before it uses them.

    The library makes file names from the commit and the ETag, so that a mirror (`HF_ENDPOINT`)
    which sends `../` in one could write anywhere. It makes a new client after some errors, so the
    factory is replaced rather than a client changed.
    """
    from huggingface_hub import get_session, set_client_factory

    client = get_session()
    hooks = client.event_hooks
    if _require_names in hooks["response"]:
        return
    checked = {"request": hooks["request"], "response": [*hooks["response"], _require_names]}
    make_client = type(client)  # httpx's, or that of its successor in later versions of the library
    set_client_factory(
        lambda: make_client(event_hooks=checked, follow_redirects=True, timeout=None)
    )


def _require_names(response: Any) -> None:
    """Raise ForgedName for an answer whose commit, ETag or path leads outside the cache."""
    _require_hexadecimal("X-Repo-Commit", response.headers.get("X-Repo-Commit"))
    if response.request.method == "HEAD":  # the ETags of other answers name no file
        name = "ETag"
        if response.headers.get("X-Linked-ETag"):  # of a large file; it replaces the other ETag
            name = "X-Linked-ETag"
        tag = response.headers.get(name)
        if tag is not None:
            _require_hexadecimal(name, tag.lstrip("W/").strip('"'))
    if not response.request.url.path.startswith("/api/models/"):
        return
    response.read()
    try:
        answer = response.json()
    except ValueError:
        return  # an error page, which the library reports
    if isinstance(answer, dict):
        _require_hexadecimal("sha", answer.get("sha"))
        listed = answer.get("siblings")
    else:
        listed = answer
    if not isinstance(listed, list):
        return
    for file in listed:
        if isinstance(file, dict):
            _require_file(file)


def _require_file(file: dict[str, Any]) -> None:
    """Raise ForgedName for a listed file that would lie outside the cache."""
    for name in ("path", "rfilename"):
        path = str(file.get(name, ""))
        if ".." in re.split(r"[/\\]", path) or path.startswith("/"):
            raise ForgedName(f"{name}={path!r}, which leads elsewhere")
    for part in (file, file.get("lfs")):
        if isinstance(part, dict):
            for name in ("oid", "sha256", "xetHash"):
                _require_hexadecimal(name, part.get(name))


def _require_hexadecimal(name: str, value: Any) -> None:
    if value is not None and not re.fullmatch(r"[0-9a-fA-F]{1,128}", str(value)):
        raise ForgedName(f"{name}={str(value)[:100]!r}, which is not hexadecimal")
