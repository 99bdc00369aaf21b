"""What llama.cpp makes of GGUF files, in a process of its own: JSON in, JSON out."""

import importlib
import json
import sys
from typing import Any


def continued(file: str, prompt: str, new: int) -> dict[str, Any]:
    """The number of the prompt's tokens, and the likeliest text after it."""
    xllamacpp: Any = importlib.import_module("xllamacpp")  # without types
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_parallel = 1
    parameters.verbosity = -1
    parameters.cpuparams.n_threads = 1
    # keys and values in float32, as ours: they are in float16 by default
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(parameters)
    asked = {"prompt": prompt, "n_predict": new, "temperature": 0.0, "ignore_eos": True}
    drawn = server.handle_completions(asked | {"cache_prompt": False})
    return {"tokens": drawn["usage"]["prompt_tokens"], "text": drawn["choices"][0]["text"]}


if __name__ == "__main__":
    json.dump([continued(**each) for each in json.load(sys.stdin)], sys.stdout)
