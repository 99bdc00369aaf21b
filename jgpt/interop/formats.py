"""The formats of other projects: their names for modules and config fields."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jgpt.config import Activation, ModelConfig
from jgpt.presets import PRESETS


@dataclass(frozen=True)
class Format:
    """How another project names modules and config fields."""

    name: str
    modules: dict[str, str]
    """From our modules to theirs. Several of ours with one name are concatenated."""
    fields: tuple[tuple[str, str], ...]
    """Pairs of their config field and ours."""
    defaults: dict[str, Any]
    """Values of missing fields. Of a field without a pair, the only supported value."""
    implied: dict[str, Any]
    """Our fields without a pair, where the value is not our default."""
    linear: bool = True
    """Kernels are (out, in), as in PyTorch's Linear; in GPT-2's Conv1D they are (in, out)."""
    prefix: str = "transformer"
    """The outer module in names of tensors."""
    architecture: str = ""
    """The class in transformers."""


_MODULES = (
    ("token_embedding", "wte", "embed_tokens"),
    ("position_embedding", "wpe", ""),
    ("blocks.{}.attention_norm", "h.{}.ln_1", "layers.{}.input_layernorm"),
    ("blocks.{}.attention.query", "h.{}.attn.c_attn", "layers.{}.self_attn.q_proj"),
    ("blocks.{}.attention.key", "h.{}.attn.c_attn", "layers.{}.self_attn.k_proj"),
    ("blocks.{}.attention.value", "h.{}.attn.c_attn", "layers.{}.self_attn.v_proj"),
    ("blocks.{}.attention.query_norm", "", "layers.{}.self_attn.q_norm"),
    ("blocks.{}.attention.key_norm", "", "layers.{}.self_attn.k_norm"),
    ("blocks.{}.attention.projection", "h.{}.attn.c_proj", "layers.{}.self_attn.o_proj"),
    ("blocks.{}.feed_forward_norm", "h.{}.ln_2", "layers.{}.post_attention_layernorm"),
    ("blocks.{}.feed_forward.gate", "", "layers.{}.mlp.gate_proj"),
    ("blocks.{}.feed_forward.expansion", "h.{}.mlp.c_fc", "layers.{}.mlp.up_proj"),
    ("blocks.{}.feed_forward.projection", "h.{}.mlp.c_proj", "layers.{}.mlp.down_proj"),
    ("final_norm", "ln_f", "norm"),
    ("head", "lm_head", "lm_head"),
)
"""Names in jgpt, in GPT-2 and nanoGPT, and in Llama and Qwen3."""

GPT2 = Format(
    "GPT-2", {ours: name for ours, name, _ in _MODULES if name},
    fields=(
        ("vocab_size", "vocab_size"), ("n_positions", "block_size"), ("n_layer", "num_layers"),
        ("n_head", "num_heads"), ("n_embd", "embed_dim"), ("n_inner", "hidden_dim"),
        ("activation_function", "activation"), ("layer_norm_epsilon", "norm_epsilon"),
        ("resid_pdrop", "dropout"), ("embd_pdrop", "dropout"), ("attn_pdrop", "dropout"),
        ("tie_word_embeddings", "tie_embeddings"),
    ),
    defaults={
        "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    implied={"positions": "learned", "norm": "layer", "qkv_bias": True, "use_bias": True},
    linear=False, architecture="GPT2LMHeadModel",
)  # fmt: skip
NANOGPT = Format(
    "nanoGPT", GPT2.modules,
    fields=(
        ("vocab_size", "vocab_size"), ("block_size", "block_size"), ("n_layer", "num_layers"),
        ("n_head", "num_heads"), ("n_embd", "embed_dim"), ("dropout", "dropout"),
        ("bias", "use_bias"), ("bias", "qkv_bias"),
    ),
    defaults={"bias": True, "dropout": 0.0},  # older checkpoints lack these
    implied={"positions": "learned", "norm": "layer", "activation": "gelu"},
)  # fmt: skip
LLAMA = Format(
    "Llama", {ours: name for ours, _, name in _MODULES if name},
    fields=(
        ("vocab_size", "vocab_size"), ("max_position_embeddings", "block_size"),
        ("num_hidden_layers", "num_layers"), ("num_attention_heads", "num_heads"),
        ("num_key_value_heads", "num_kv_heads"), ("head_dim", "head_dim"),
        ("hidden_size", "embed_dim"), ("intermediate_size", "hidden_dim"),
        ("hidden_act", "activation"), ("rms_norm_eps", "norm_epsilon"),
        ("rope_theta", "rotary_base"), ("tie_word_embeddings", "tie_embeddings"),
    ),
    defaults={
        "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "rope_parameters": {"rope_type": "default"}, "rope_scaling": None,
        "rope_interleaved": False, "tie_word_embeddings": False, "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "layer_types": "full_attention",
        "quantization_config": None,
    },
    implied={"positions": "rotary", "norm": "rms", "gated": True},
    prefix="model", architecture="LlamaForCausalLM",
)  # fmt: skip
QWEN3 = dataclasses.replace(
    LLAMA, name="Qwen3", architecture="Qwen3ForCausalLM",
    # one epsilon for all norms, and that of QK-norm is fixed in jgpt
    fields=tuple(pair for pair in LLAMA.fields if pair[1] != "norm_epsilon"),
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
    implied=LLAMA.implied | {"qk_norm": True, "qk_norm_scale": True, "norm_epsilon": 1e-6},
)  # fmt: skip
HF_FORMATS = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}
"""By `model_type`."""

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
}
_IRRELEVANT = (
    "ngram_rows", "ngram_dropout", "zero_init", "dropout", "dtype",
    "activation_dtype", "attention_kernel", "param_dtype", "rematerialise", "scan_layers",
)  # fmt: skip
"""Our fields that don't change what a trained model computes."""


def read_config(values: dict[str, Any], format: Format) -> ModelConfig:
    """Read another project's config. Raises ValueError for missing or unsupported fields."""
    if isinstance(rope := values.get("rope_parameters"), dict):
        # since version 5, transformers writes rope_theta there
        rope = dict(rope)
        base = {"rope_theta": rope.pop("rope_theta")} if "rope_theta" in rope else {}
        values = values | base | {"rope_parameters": rope}
    values, names = format.defaults | values, dict(format.fields)
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for name in format.defaults.keys() - names.keys():
        value, only = values[name], format.defaults[name]
        if any(each != only for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name}={value!r} is not supported, only {only!r}")
    fields = dict(format.implied)
    for theirs, ours in format.fields:
        value = values[theirs]
        if ours == "activation":
            if not isinstance(value, str) or value not in _ACTIVATIONS:
                known = ", ".join(_ACTIVATIONS)
                raise ValueError(f"{theirs}={value!r} is not supported, only {known}")
            value = _ACTIVATIONS[value]
        if fields.setdefault(ours, value) != value:
            raise ValueError(
                f"{theirs}={value!r}: jgpt has one {ours} rate, and another is {fields[ours]!r}; "
                "make them equal"
            )
    return ModelConfig(**fields)


def hf_config(
    config: ModelConfig, model_type: str | None = None, *, zero_biases: bool = False
) -> dict[str, Any]:
    """A model's `config.json` for transformers, of the `model_type` that `save_hf` describes.

    Raises ValueError for a model that the format can't express.
    """
    if config.make is not None:
        raise ValueError("a model of your own can't be exported: no format describes it")
    rotary = "qwen3" if config.qk_norm else "llama"
    kind = model_type or (rotary if config.positions == "rotary" else "gpt2")
    format = HF_FORMATS[kind]
    if refused := _unsupported(config, format, zero_biases):
        if model_type is None and "zero_biases" not in refused:
            plain = [
                name for name in PRESETS if not _unsupported(PRESETS[name][1].model, GPT2, True)
            ]
            refused += (
                f", and no other format fits. The presets that can be exported: {', '.join(plain)}"
            )
        raise ValueError(refused)
    theirs = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    values = dataclasses.asdict(config) | {
        "activation": theirs[config.activation],
        "num_kv_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_size,
        "hidden_dim": config.hidden_dim or 4 * config.embed_dim,
    }
    return {
        "model_type": kind,
        "architectures": [format.architecture],
        **{name: values[ours] for name, ours in format.fields},
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float64" if config.param_dtype == "float64" else "float32",
    }


def _unsupported(config: ModelConfig, format: Format, zero_biases: bool) -> str | None:
    """The first field that a format can't express, in words."""
    default, fields = ModelConfig(**format.implied), [ours for _, ours in format.fields]
    meant = {  # the values that None stands for
        "num_kv_heads": config.num_heads,
        "head_dim": config.embed_dim / config.num_heads,
        "attention_scale": config.head_size**-0.5,
    }
    for name in dict.fromkeys([*format.implied, *dataclasses.asdict(config)]):
        value, only = getattr(config, name), getattr(default, name)
        if name in (*fields, *_IRRELEVANT) or value in (only, meant.get(name, only)):
            continue
        refused = f"{format.name}'s format doesn't support {name}={value!r}"
        if only is not True or not name.endswith("_bias"):
            return f"{refused}, only {name}={only!r}"
        if not zero_biases:
            return f"{refused}: zero_biases=True writes zeros for the missing biases"
    return None
