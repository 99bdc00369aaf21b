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
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of an alternative name that transformers accepts, and their config field."""


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
    aliases=(
        ("hidden_size", "n_embd"), ("max_position_embeddings", "n_positions"),
        ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer"),
    ),
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
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
"""Their names of activations, and jgpt's. Of several names, an export writes the first."""
_IRRELEVANT = (
    "ngram_rows", "ngram_dropout", "zero_init", "dropout", "dtype", "qk_norm_epsilon",
    "activation_dtype", "attention_kernel", "param_dtype", "remat", "scan_layers",
)  # fmt: skip
"""Fields of jgpt that don't change the output of a trained model. The epsilon of QK-norm does, but
only in a format with QK-norm, where it is a field."""


def read_config(values: dict[str, Any], format: Format) -> ModelConfig:
    """Read another project's config. Raises ValueError for missing or unsupported fields."""
    values = _without_aliases(values, format)
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
        value = values[theirs]
        if ours == "activation":
            value = _read_activation(theirs, value)
        fields[ours] = value
    rates = [values[theirs] for theirs, ours in format.fields if ours == "dropout"]
    if rates:
        # The lowest, so that an import trains with no more dropout than its source.
        fields["dropout"] = min(rates)
    return ModelConfig(**fields)


def _without_aliases(values: dict[str, Any], format: Format) -> dict[str, Any]:
    """Replace alternative names in a config, so that each value has one name."""
    values = dict(values)
    for alias, name in format.aliases:
        if alias not in values:
            continue
        value = values.pop(alias)
        values.setdefault(name, value)
    return values


def _without_rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the parameters of plain rotary positions by their base, as `rope_theta`.

    Since version 5, transformers writes the base into `rope_parameters`. It prefers `rope_scaling`,
    which older versions wrote, and prefers a base inside either of them to one beside them.
    """
    values = dict(values)
    parameters = values.pop("rope_parameters", None)
    scaling = values.pop("rope_scaling", None)
    for name, rope in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if rope is not None and not _is_plain_rope(rope):
            raise ValueError(
                f"{name}={rope!r} is not supported, only {{'rope_type': 'default'}} or linear "
                "scaling by 1"
            )
    rope = scaling or parameters or {}
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    return values


def _is_plain_rope(rope: Any) -> bool:
    """Return whether the parameters of rotary positions describe the ones that jgpt computes."""
    if not isinstance(rope, dict):
        return False
    allowed = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
    allowed |= {"partial_rotary_factor", "factor"}
    if not rope.keys() <= allowed:
        return False
    if rope.get("partial_rotary_factor", 1.0) != 1 or rope.get("factor", 1.0) != 1:
        return False
    return rope.get("rope_type", rope.get("type", "default")) in ("default", "linear")


def _require_supported(name: str, value: Any, only: Any) -> None:
    """Raise ValueError for a value of a field that jgpt lacks, unless it is the `only` one."""
    if value is None and name in ("layer_types", "pruned_heads"):
        return
    if name == "layer_types":  # a list with one word for each layer
        only = "full_attention"
        if isinstance(value, list) and all(kind == only for kind in value):
            return
    if value != only:
        raise ValueError(f"{name}={value!r} is not supported, only {only!r}")


def _read_activation(name: str, value: Any) -> Activation:
    if value not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{name}={value!r} is not supported, only {known}")
    return _ACTIVATIONS[value]


def hf_config(config: ModelConfig, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a model's `config.json` for transformers, in the format that `save_hf` describes.

    `source` is the original `config.json` of the model. Its fields that still hold for this model
    are kept unchanged, and so are fields that don't change what is computed. Raises ValueError for
    a model that the format can't express.
    """
    if config.make is not None:
        raise ValueError("a custom model can't be exported: no format describes it")
    format = natural_format(config)
    problem = unsupported(config, format)
    if problem is not None:
        nearest = _nearest_exportable(config)
        raise ValueError(f"{problem}, and no other format fits; the preset {nearest} has one")
    kind = _kind_of(format)
    written = {"model_type": kind, "architectures": [format.architecture]}
    values = _explicit_values(config)
    # In reverse, since the first field of two that share a name is the one that is written.
    for theirs, ours in reversed(format.fields):
        written[theirs] = values[ours]
    # `write_tensors` widens all other dtypes to float32.
    written["dtype"] = "float32"
    if config.param_dtype == "float64":
        written["dtype"] = "float64"
    if kind == "gpt2":
        # transformers doesn't use this field; other programs read it as the context length.
        written["n_ctx"] = config.block_size
    if kind == "apertus":
        # Without this field, transformers scales the positions as in Llama 3.
        written["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if source is None or source.get("model_type", "gpt2") != kind:
        return written | {"bos_token_id": None, "eos_token_id": None}
    return _in_words_of(source, written, config, format)


def natural_format(config: ModelConfig) -> Format:
    """Return the format that expresses most of a model."""
    if config.positions != "rotary":
        return GPT2
    if not config.gated:
        return APERTUS
    return QWEN3 if config.qk_norm else LLAMA


def _kind_of(format: Format) -> str:
    """Return the `model_type` of a format."""
    (kind,) = [kind for kind, other in HF_FORMATS.items() if other is format]
    return kind


def _nearest_exportable(config: ModelConfig) -> str:
    """Return the preset that can be exported and differs from a model in the fewest fields."""
    values = dataclasses.asdict(config)
    differences = {}
    for name, (_, preset) in PRESETS.items():
        model = dataclasses.replace(preset.model, vocab_size=config.vocab_size)
        if unsupported(model, natural_format(model)) is None:
            differences[name] = sum(getattr(model, field) != values[field] for field in values)
    return min(differences, key=differences.__getitem__)


def _explicit_values(config: ModelConfig) -> dict[str, Any]:
    """Return the config's values, with None resolved, and with the other project's names."""
    activation_names: dict[str, str] = {}
    for theirs, ours in _ACTIVATIONS.items():
        activation_names.setdefault(ours, theirs)  # the first of several names
    return dataclasses.asdict(config) | {
        "activation": activation_names[config.activation],
        "num_kv_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_size,
        "hidden_dim": config.hidden_dim or 4 * config.embed_dim,
    }


def _in_words_of(
    source: dict[str, Any], written: dict[str, Any], config: ModelConfig, format: Format
) -> dict[str, Any]:
    """Return a written config, with the fields of the model's original config that still hold."""
    source_config = read_config(source, format)
    kept = {name: value for name, value in source.items() if name not in WRITTEN_ANEW}
    for theirs, ours in format.fields:
        # Compared as configs, since null or a missing field can mean the same as a number.
        if getattr(source_config, ours) == getattr(config, ours):
            written.pop(theirs, None)
    for alias, name in format.aliases:
        if name in written:  # the written name has another value
            kept.pop(alias, None)
    return kept | written


def unsupported(config: ModelConfig, format: Format) -> str | None:
    """Return a message about the first field that a format can't express, or None.

    A bias or a norm's scale that the model lacks is no problem: zeros and ones are written.
    """
    # The values of the format's models in fields that it lacks.
    only_model = ModelConfig(**format.implied)
    expressed = {ours for _, ours in format.fields}
    defaults = {  # the values that None stands for
        "num_kv_heads": config.num_heads,
        "head_dim": config.embed_dim / config.num_heads,
        "attention_scale": config.head_size**-0.5,
    }
    # Implied fields come first, since they tell what kind of model the format is for.
    for name in dict.fromkeys([*format.implied, *dataclasses.asdict(config)]):
        if name in expressed or name in _IRRELEVANT:
            continue
        value = getattr(config, name)
        only = getattr(only_model, name)
        is_default = name in defaults and value == defaults[name]
        is_missing_part = only is True and name.endswith(("_bias", "norm_scale"))
        if value == only or is_default or is_missing_part:
            continue
        if name == "head_bias" and format is GPT2:
            if _has_room_for_head_bias(config):
                continue
            return (
                "GPT-2's format has room for `head_bias=True` only with `use_bias=True` and at "
                f"most `embed_dim` + 1 = {config.embed_dim + 1} tokens, not {config.vocab_size}"
            )
        return f"{format.name}'s format doesn't support `{name}={value!r}`, only `{name}={only!r}`"
    return None


def _has_room_for_head_bias(config: ModelConfig) -> bool:
    """Return whether the last norm's bias can stand for any bias of the head."""
    # A number for each token, up to one that is added to all of them.
    return config.use_bias and config.vocab_size <= config.embed_dim + 1
