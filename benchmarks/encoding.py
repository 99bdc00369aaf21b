"""Encode a text with GPT-2's byte-pairs, as others do it, into a file of uint16."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def chunks(text: str) -> list[str]:
    """About a megabyte each, cut where a line ends."""
    found = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + (1 << 20)) + 1 or len(text)
        found.append(text[start:end])
        start = end
    return found


def tiktoken_of(files: str) -> Any:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = data_gym_to_mergeable_bpe_ranks(f"{files}/vocab.bpe", f"{files}/encoder.json")
    special = {"<|endoftext|>": 50256}
    return tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
    )


def encode(way: str, text: str, files: str, out: str) -> None:
    """Encode a text, with encoder.json and vocab.bpe in a folder of files.

    The way is tiktoken's fastest call on chunks of a megabyte in threads; that of nanoGPT's
    prepare.py, the whole text at once on one thread; or `encode_batch` of tokenizers, in chunks.
    """
    words = Path(text).read_text(encoding="utf-8")
    with open(out, "wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        if way == "nanogpt":
            np.array(tiktoken_of(files).encode_ordinary(words), np.uint16).tofile(file)
        elif way == "tiktoken":
            for tokens in pool.map(tiktoken_of(files).encode_to_numpy, chunks(words)):
                file.write(tokens.astype(np.uint16).tobytes())
        else:
            from jgpt.data.byte_pairs import BPETokenizer

            backend = BPETokenizer.from_gpt2(Path(files))._backend
            for chunk in chunks(words):
                for encoded in backend.encode_batch(chunk.splitlines(keepends=True)):
                    file.write(np.array(encoded.ids, np.uint16).tobytes())
