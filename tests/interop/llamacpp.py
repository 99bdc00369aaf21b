"""What llama.cpp makes of GGUF files, in a process of its own: JSON in, JSON out."""

import importlib
import json
import sys
from typing import Any


def continued(file: str, prompt: str, new: int) -> dict[str, Any]:
    """The number of the prompt's tokens, the likeliest text after it, and the log probabilities of
    the likeliest next tokens, where the likeliest is whole characters."""
    xllamacpp: Any = importlib.import_module("xllamacpp")  # without types
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_parallel = 1
    parameters.verbosity = -1
    parameters.cpuparams.n_threads = 1
    # in float32, as ours: by default attention and its cache have half of the bits
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    how = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    drawn = server.handle_completions(how | {"n_predict": new})
    first = server.handle_completions(how | {"n_predict": 1, "logprobs": 5})
    logs = (first["choices"][0]["logprobs"] or {"content": [{"top_logprobs": []}]})["content"]
    return {
        "tokens": drawn["usage"]["prompt_tokens"],
        "text": drawn["choices"][0]["text"],
        "log_probabilities": [[each["id"], each["logprob"]] for each in logs[0]["top_logprobs"]],
    }


if __name__ == "__main__":
    json.dump([continued(**each) for each in json.load(sys.stdin)], sys.stdout)
