"""nanoGPT's checkpoints, read with `torch.load(weights_only=True)`."""

import warnings
from pathlib import Path
from typing import Any

from jgpt.config import ModelConfig
from jgpt.interop.names import GPT2, our_fields, plain_names, prefix_errors, read_tensors
from jgpt.nn.transformer import GPT

_FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "embed_dim",
    "block_size": "block_size",
    "bias": "use_bias",
    "dropout": "dropout",
}


def load_nanogpt(file: str | Path) -> GPT:
    """Load the model of a nanoGPT `ckpt.pt`; no code in the file is run.

    Raises ModuleNotFoundError without PyTorch, and OSError or ValueError for any other file.
    """
    file = Path(file)
    try:
        import torch
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nanoGPT's checkpoints need PyTorch: pip install torch") from None
    with file.open("rb") as opened, prefix_errors(file):
        try:
            with warnings.catch_warnings(action="ignore"):  # the error below says it in one line
                checkpoint = torch.load(opened, map_location="cpu", weights_only=True)
            arguments = dict(checkpoint["model_args"])
            # torch.compile adds the prefix
            stored = {
                name.removeprefix("_orig_mod."): tensor
                for name, tensor in checkpoint["model"].items()
            }
            tensors = {
                short: stored[name].float().numpy() for short, name in plain_names(stored).items()
            }
        except Exception as error:  # a damaged file can raise anything
            # a sentence of PyTorch's, and not its advice on how to run code from the file
            reason = (str(error).splitlines() or [""])[0].split(". ")[0][:200]
            raise ValueError(
                f"not a nanoGPT checkpoint ({type(error).__name__}: {reason})"
            ) from None
        return read_tensors(_config_from_nanogpt(arguments), tensors, GPT2, linear=True)


def _config_from_nanogpt(arguments: dict[str, Any]) -> ModelConfig:
    # checkpoints older than the option have biases
    fields = our_fields(arguments, _FIELDS, {"bias": True, "dropout": 0.0})
    return ModelConfig(**fields, activation="gelu", qkv_bias=fields["use_bias"])
