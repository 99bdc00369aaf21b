"""Encode a text with GPT-2's byte-pairs, as others do it, into a file of uint16."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import tyro


def chunks(text: str) -> list[str]:
    """About a megabyte each, cut where a line ends."""
    found, start = [], 0
    while start < len(text):
        end = text.find("\n", start + (1 << 20)) + 1 or len(text)
        found.append(text[start:end])
        start = end
    return found


def gpt2_of_tiktoken(files: Path):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = data_gym_to_mergeable_bpe_ranks(str(files / "vocab.bpe"), str(files / "encoder.json"))
    special = {"<|endoftext|>": 50256}
    return tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
    )


def main(
    way: Literal["tiktoken", "nanogpt", "tokenizers"], text: Path, files: Path, out: Path
) -> None:
    """Encode a text.

    Args:
        way: tiktoken's fastest call on chunks of a megabyte in threads; nanoGPT's prepare.py, the
            whole text at once on one thread; or `encode_batch` of tokenizers, in chunks.
        files: The folder of encoder.json and vocab.bpe.
    """
    words = text.read_text(encoding="utf-8")
    with out.open("wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        if way == "nanogpt":
            np.array(gpt2_of_tiktoken(files).encode_ordinary(words), np.uint16).tofile(file)
        elif way == "tiktoken":
            for tokens in pool.map(gpt2_of_tiktoken(files).encode_to_numpy, chunks(words)):
                file.write(tokens.astype(np.uint16).tobytes())
        else:
            from jgpt.data.tokenizers import BPETokenizer

            backend = BPETokenizer.from_gpt2(files)._backend
            for chunk in chunks(words):
                for encoded in backend.encode_batch(chunk.splitlines(keepends=True)):
                    file.write(np.array(encoded.ids, np.uint16).tobytes())


if __name__ == "__main__":
    tyro.cli(main)
