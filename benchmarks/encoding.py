"""Encode a text with GPT-2's byte-pairs, as others do it, into a file of uint16.

- tiktoken: chunks of a megabyte in threads, by its fastest call
- nanogpt: the whole text at once on one thread, as nanoGPT's prepare.py
- tokenizers: chunks of a megabyte, by its `encode_batch`
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro


@dataclass(frozen=True)
class Options:
    way: Literal["tiktoken", "nanogpt", "tokenizers"]
    text: Path
    files: Path
    """The folder of encoder.json and vocab.bpe."""
    out: Path


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

    vocab, encoder = str(files / "vocab.bpe"), str(files / "encoder.json")
    ranks = data_gym_to_mergeable_bpe_ranks(vocab, encoder)
    special = {"<|endoftext|>": 50256}
    return tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
    )


def main(options: Options) -> None:
    text = options.text.read_text(encoding="utf-8")
    if options.way == "nanogpt":
        np.array(gpt2_of_tiktoken(options.files).encode_ordinary(text), np.uint16).tofile(
            options.out
        )
        return
    with options.out.open("wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        if options.way == "tiktoken":
            encoder = gpt2_of_tiktoken(options.files)
            for tokens in pool.map(encoder.encode_to_numpy, chunks(text)):
                file.write(tokens.astype(np.uint16).tobytes())
        else:
            from jgpt.data.tokenizers import BPETokenizer

            backend = BPETokenizer.from_gpt2(options.files)._backend
            for chunk in chunks(text):
                for encoded in backend.encode_batch(chunk.splitlines(keepends=True)):
                    file.write(np.array(encoded.ids, np.uint16).tobytes())


if __name__ == "__main__":
    main(tyro.cli(Options))
