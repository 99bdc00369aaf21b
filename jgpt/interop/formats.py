"""The formats of other projects: their names of modules and config fields."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jgpt.config import Activation, ModelConfig
from jgpt.interop.config_fields import HARMLESS, WRITTEN_ANEW
from jgpt.presets import PRESETS


@dataclass(frozen=True)
class Format:
    """The names of modules and config fields in another project."""

    name: str
    modules: dict[str, str]
    """From jgpt's modules to theirs. Several modules with one name are concatenated."""
    fields: tuple[tuple[str, str], ...]
    """Pairs of their config field and jgpt's."""
    defaults: dict[str, Any]
    """Values of missing fields. For a field without a pair, this is the only supported value."""
    implied: dict[str, Any]
    """Values of jgpt's fields without a pair, where they differ from jgpt's defaults."""
    linear: bool = True
    """Whether kernels are (out, in), as in PyTorch's Linear; in GPT-2's Conv1D they are (in,
    out)."""
    prefix: str = "transformer"
    """The outer module in the names of tensors."""
    architecture: str = ""
    """The name of the class in transformers."""


# Each row of a table is one line, so that formats can be compared column by column.
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
"""Names in jgpt, in GPT-2 and nanoGPT, and in Llama and Qwen3; none for what a format lacks."""

_DECODER = {
    "is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False,
    "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {},
}  # fmt: skip
"""Values of fields of every transformers config, which these models must have."""

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
        "quantization_config": None, **_DECODER,
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
    defaults={"bias": True, "dropout": 0.0},  # older checkpoints lack these fields
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
        "rope_theta": 10_000.0, "rope_interleaved": False, "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "layer_types": None, "quantization_config": None, **_DECODER,
    },
    implied={"positions": "rotary", "norm": "rms", "gated": True},
    prefix="model", architecture="LlamaForCausalLM",
)  # fmt: skip
QWEN3 = dataclasses.replace(
    LLAMA, name="Qwen3", architecture="Qwen3ForCausalLM",
    # all norms share one epsilon
    fields=(*LLAMA.fields, ("rms_norm_eps", "qk_norm_epsilon")),
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
    implied=LLAMA.implied | {"qk_norm": True, "qk_norm_scale": True},
)  # fmt: skip
APERTUS = dataclasses.replace(
    QWEN3, name="Apertus", architecture="ApertusForCausalLM",
    modules=QWEN3.modules | {
        "blocks.{}.attention_norm": "layers.{}.attention_layernorm",
        "blocks.{}.feed_forward_norm": "layers.{}.feedforward_layernorm",
    },
    # Apertus's own activation is xIELU, and its positions are scaled unless a config says otherwise
    defaults={
        **{name: value for name, value in LLAMA.defaults.items() if name != "rope_theta"},
        "hidden_act": "xielu", "rms_norm_eps": 1e-5,
    },
    implied=QWEN3.implied | {"gated": False},
)  # fmt: skip
HF_FORMATS = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3, "apertus": APERTUS}
"""The formats by `model_type`."""

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
}
"""Their names of activations, and jgpt's. Of two names, an export writes the first."""
_IRRELEVANT = (
    "vocab_size", "block_size", "ngram_rows", "ngram_dropout", "zero_init", "dropout", "dtype",
    "activation_dtype", "attention_kernel", "param_dtype", "remat", "scan_layers", "make",
    "qk_norm_epsilon",
)  # fmt: skip
"""Fields of jgpt that don't change the output of a trained model, or that all formats have."""


def read_config(values: dict[str, Any], format: Format) -> ModelConfig:
    """Read another project's config. Raises ValueError for missing or unsupported fields."""
    if format.implied["positions"] == "rotary":
        values = _without_rope_parameters(values)
    values = format.defaults | values
    pairs = dict(format.fields)
    missing = [name for name in pairs if name not in values]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    unknown = sorted(values.keys() - pairs.keys() - format.defaults.keys() - HARMLESS)
    if unknown:
        raise ValueError(
            f"{unknown[0]}={values[unknown[0]]!r} is not supported: a field that jgpt does not "
            f"know may change what the model computes (unknown: {', '.join(unknown)})"
        )
    # jgpt has no field for these; another value would compute something else.
    # Sorted, since the order of a set of texts differs from process to process.
    for name in sorted(format.defaults.keys() - pairs.keys()):
        _require_supported(name, values[name], format.defaults[name])
    fields = dict(format.implied)
    for theirs, ours in format.fields:
        fields[ours] = values[theirs]
    rates = [values[theirs] for theirs, ours in format.fields if ours == "dropout"]
    if rates:
        # The lowest, so that an import trains with no more dropout than its source.
        fields["dropout"] = min(rates)
    fields["activation"] = _ACTIVATIONS.get(fields["activation"], fields["activation"])
    return ModelConfig(**fields)


def _without_rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the parameters of plain rotary positions by their base, as `rope_theta`.

    transformers writes them into `rope_parameters`, and did into `rope_scaling`, which it prefers.
    """
    values = dict(values)
    for name in ("rope_parameters", "rope_scaling"):
        given = values.pop(name, None) or {}
        rope = dict(given)
        if "rope_theta" in rope:
            values["rope_theta"] = rope.pop("rope_theta")
        if rope not in ({}, {"rope_type": "default"}):
            raise ValueError(f"{name}={given!r} is not supported, only 'rope_type': 'default'")
    return values


def _require_supported(name: str, value: Any, only: Any) -> None:
    """Raise ValueError for a value of a field that jgpt lacks, unless it is the `only` one."""
    if name == "layer_types" and value is not None:  # a list with one word for each layer
        only = ["full_attention"] * len(value)
    if value != only:
        raise ValueError(f"{name}={value!r} is not supported, only {only!r}")


def hf_config(config: ModelConfig, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a model's `config.json` for transformers, in the format that `save_hf` describes.

    `source` is the original `config.json` of the model. Its fields that still hold for this model
    are kept unchanged, and so are fields that don't change what is computed. Raises ValueError for
    a model that the format can't express.
    """
    if config.make is not None:
        raise ValueError("a custom model can't be exported: no format describes it")
    problem = _problem_of(config)
    if problem is not None:
        nearest = _nearest_exportable(config)
        raise ValueError(f"{problem}, and no other format fits; the preset {nearest} has one")
    format = natural_format(config)
    written = _fields_of(config, format)
    written["architectures"] = [format.architecture]
    # `write_tensors` widens all other dtypes to float32.
    written["dtype"] = "float32"
    if config.param_dtype == "float64":
        written["dtype"] = "float64"
    if format is GPT2:
        # transformers doesn't use this field; other programs read it as the context length.
        written["n_ctx"] = config.block_size
    if source is None or source.get("model_type", "gpt2") != written["model_type"]:
        return written | {"bos_token_id": None, "eos_token_id": None}
    source_config = read_config(source, format)
    for theirs, ours in format.fields:
        # Compared as configs, since null or a missing field can mean the same as a number.
        if getattr(source_config, ours) == getattr(config, ours):
            written.pop(theirs, None)
    kept = {name: value for name, value in source.items() if name not in WRITTEN_ANEW}
    return kept | written


def natural_format(config: ModelConfig) -> Format:
    """Return the format that expresses most of a model."""
    if config.positions != "rotary":
        return GPT2
    if not config.gated:
        return APERTUS
    if config.qk_norm:
        return QWEN3
    return LLAMA


def _fields_of(config: ModelConfig, format: Format) -> dict[str, Any]:
    """Return a model's fields in the words of a format, with its `model_type`."""
    (kind,) = [kind for kind, other in HF_FORMATS.items() if other is format]
    values = _explicit_values(config)
    values["activation"] = _name_of_activation(config.activation)
    written: dict[str, Any] = {"model_type": kind}
    # In reverse, since of two fields of one name the first is written: all norms have one epsilon.
    for theirs, ours in reversed(format.fields):
        written[theirs] = values[ours]
    if format is APERTUS:
        # Without this field, transformers scales the positions as in Llama 3.
        written["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_base}
    return written


def _problem_of(config: ModelConfig) -> str | None:
    """Return a message about the first field that a model's format can't express, or None.

    A bias or a norm's scale that the model lacks is no problem, nor is an epsilon of QK-norm:
    `write_tensors` writes them into weights.
    """
    format = natural_format(config)
    read_back = _explicit_values(read_config(_fields_of(config, format), format))
    for name, value in _explicit_values(config).items():
        only = read_back[name]
        is_missing_part = only is True and name.endswith(("_bias", "norm_scale"))
        if value == only or name in _IRRELEVANT or is_missing_part:
            continue
        if name != "head_bias" or format is not GPT2:
            return (
                f"{format.name}'s format doesn't support `{name}={value!r}`, only `{name}={only!r}`"
            )
        # The last norm's bias has a number for each feature, and one for all tokens is free.
        if not config.use_bias or config.vocab_size > config.embed_dim + 1:
            return (
                "GPT-2's format has room for `head_bias=True` only with `use_bias=True` and at "
                f"most `embed_dim` + 1 = {config.embed_dim + 1} tokens, not {config.vocab_size}"
            )
    return None


def _nearest_exportable(config: ModelConfig) -> str:
    """Return the preset that can be exported and differs from a model in the fewest fields."""
    values = dataclasses.asdict(config)
    differences = {}
    for name, (_, preset) in PRESETS.items():
        model = dataclasses.replace(preset.model, vocab_size=config.vocab_size)
        if _problem_of(model) is None:
            differences[name] = sum(getattr(model, field) != values[field] for field in values)
    return min(differences, key=differences.__getitem__)


def _name_of_activation(activation: Activation) -> str:
    """Return the first of the names that transformers has for an activation."""
    return next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == activation)


def _explicit_values(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config, with what None stands for."""
    return dataclasses.asdict(config) | {
        "num_kv_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_size,
        "hidden_dim": config.hidden_dim or 4 * config.embed_dim,
        "attention_scale": config.attention_scale or config.head_size**-0.5,
    }
