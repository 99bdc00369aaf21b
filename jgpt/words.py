"""What dimensions are called, and which word was meant."""

import difflib
from collections.abc import Iterable

OTHER_NAMES = {
    **{"lr": "learning_rate", "min_lr": "min_learning_rate", "wd": "weight_decay"},
    **dict.fromkeys(("max_iters", "max_steps", "num_steps", "iters", "n_steps"), "steps"),
    **dict.fromkeys(("n_layer", "n_layers", "layers", "depth"), "num_layers"),
    **dict.fromkeys(("n_head", "n_heads", "heads"), "num_heads"),
    **dict.fromkeys(("n_embd", "n_embed", "d_model", "hidden_size", "width"), "embed_dim"),
    **dict.fromkeys(("context_length", "seq_len", "max_seq_len", "context"), "block_size"),
    **{"grad_clip": "gradient_clip", "bs": "batch_size", "eval_iters": "eval_tokens"},
    **{"dataset": "data", "output": "out", "out_dir": "out", "o": "out", "bias": "use_bias"},
    **{"max_tokens": "max_new_tokens", "temp": "temperature", "n": "num_samples"},
    **{"start": "prompt", "precision": "dtype", "file": "prompt_file"},
    **{"init_from": "initial", "gradient_accumulation_steps": "micro_batches"},
    **dict.fromkeys(("wandb", "wandb_log"), "trackers"),
    **{"rematerialise": "remat", "checkpointing": "remat", "gradient_checkpointing": "remat"},
}
"""What other programs call a field or an option."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown word, to append to a message, or an empty string."""
    # An option is compared as the field that it is: --batch-size as batch_size.
    known_by_field = {}
    for name in known:
        known_by_field[_as_field(name)] = name
    field = _as_field(word)
    close = difflib.get_close_matches(OTHER_NAMES.get(field, field), known_by_field, n=1)
    if not close:
        return ""
    return f" (did you mean {known_by_field[close[0]]!r}?)"


def _as_field(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def format_bytes(size: int) -> str:
    """Format a size in a binary unit, such as 1.5 MiB."""
    units = "bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"
    # The largest power of 1024 that is not above the size: 1024 is 2**10.
    power = max(size.bit_length() - 1, 0) // 10
    power = min(power, len(units) - 1)
    digits = 1
    if power == 0:  # there is no part of a byte
        digits = 0
    return f"{size / 1024**power:,.{digits}f} {units[power]}"


def counted(number: int, noun: str) -> str:
    """A number of things in words: 1 token, 2 tokens."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"


LEGEND: dict[str, str] = {
    "batch": "sequences in a batch; `*batch` is any number of leading axes",
    "time": "positions in a sequence",
    "query": "positions of the queries",
    "key": "positions of the keys and values",
    "head_dim": "features of one head's queries and keys",
    "value_dim": "features of one head's values",
    "heads": "attention heads",
    "layers": "transformer blocks",
    "kv_heads": "key-value heads, each shared by a group of query heads",
    "embed_dim": "features of the residual stream",
    "vocab": "tokens in the vocabulary",
    "choices": "candidates, one of which is drawn by weight",
    "features": "features of all heads concatenated",
    "in_features": "input features of a linear layer",
    "out_features": "output features of a linear layer",
    "leading": "leading axes of a mask, which are broadcast to those of a batch",
    "rows": "any leading axes of an operation on the last axis",
    "chunks": "chunks of a batch whose logits are computed in turn",
    "chunk": "positions in a chunk",
    "steps": "optimizer steps in a call",
    "window": "a block of inputs and one more token, the last target",
    "batches": "batches of evaluation windows",
    "tokens": "tokens in a text, a split or a file",
    "held_out": "tokens in the validation split",
    "unseen": "tokens in the test split",
    "words": "32-bit words of a key of `jax.random.PRNGKey`",
    "shape": "the shape of a parameter; `?*shape` is each leaf's own",
}
"""The dimension names of all annotations. A module's own sizes are written `{self.name}`."""
