"""What GPT-2 directories may not contain, and what a directory that jgpt writes is made of."""

import dataclasses
import json
import re
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx
from safetensors.numpy import load_file, save, save_file

import jgpt
from jgpt.data.encode import tokenizer_from_json
from jgpt.interop import formats
from jgpt.interop.formats import hf_config, read_config
from jgpt.interop.gguf import save_gguf
from jgpt.interop.names import require_its_tokenizer, require_names, with_padding
from jgpt.nn.models import abstract_model
from jgpt.presets import PRESETS
from tests.models import FAMILIES, SIZES, config_of, loud, random_gpt, to_torch, weights_of
from tests.quick import only

GPT2 = FAMILIES["gpt2"]
CONFIG = jgpt.ModelConfig(**SIZES, **GPT2)


def random_model(config=CONFIG, **changes):
    return loud(abstract_model(dataclasses.replace(config, **changes)), size=0.3)


@pytest.fixture
def model():
    return random_model()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    jgpt.save_hf(random_model(), folder / "gpt2")
    jgpt.save_hf(random_gpt("qwen3"), folder / "qwen3")
    return folder


@pytest.fixture
def directory(exported, tmp_path):
    return shutil.copytree(exported / "gpt2", tmp_path / "gpt2")


def assert_same_weights(model, other):
    found = to_torch(weights_of(model))
    expected = to_torch(weights_of(other))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.array_equal(array, expected[name]), name


def characters(count, first=0):
    return jgpt.CharTokenizer("".join(chr(code) for code in range(first, first + count)))


def change(path, **fields):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **fields}))


TEXT = "abcdefghijklmnop\n" * 40


def exported_json(model, folder, name, **options):
    jgpt.save_hf(model, folder, **options)
    return json.loads((folder / name).read_text())


def test_a_special_token_begins_and_ends_a_text_for_other_programs(tmp_path):
    """It is inside the model's vocabulary, and named only where the tokenizer has one."""
    trained = jgpt.BPETokenizer.train([TEXT], 263)
    end = trained.end_of_text

    for number, (tokenizer, name, token) in enumerate(
        (
            (trained, "<|endoftext|>", end),
            (jgpt.ByteTokenizer(), None, None),
            (jgpt.CharTokenizer.from_text(TEXT), None, None),
        )
    ):
        folder = tmp_path / str(number)
        model = random_model(vocab_size=tokenizer.vocab_size)
        config = exported_json(model, folder, "config.json", tokenizer=tokenizer)
        assert config["bos_token_id"] == token
        assert config["eos_token_id"] == token
        assert config["vocab_size"] == tokenizer.vocab_size
        assert config["n_ctx"] == 11

        tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
        for special in ("bos_token", "eos_token", "unk_token"):
            assert tokenizer_config.get(special) == name

        again = jgpt.BPETokenizer.from_hf(json.loads((folder / "tokenizer.json").read_text()))
        assert again.vocab_size == tokenizer.vocab_size
        assert np.array_equal(again.encode(TEXT), tokenizer.encode(TEXT))
        if name is not None:
            assert again.encode(name).tolist() == [token]


def test_a_model_that_computes_something_else_is_not_exported(model, tmp_path):
    class Shifted(jgpt.FeedForward):
        def __call__(self, x, *, rngs=None):
            return 3 * super().__call__(x, rngs=rngs)

    class Named(jgpt.GPT):
        """Another name, and the same numbers."""

    named = Named(model.config, rngs=nnx.Rngs(0))
    nnx.update(named, nnx.state(model))
    jgpt.save_hf(named, tmp_path / "named")

    plain = model.blocks[1].feed_forward
    model.blocks[1].feed_forward = Shifted(model.config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="can't be exported: it computes something else"):
        jgpt.save_hf(model, tmp_path / "shifted")
    wider = dataclasses.replace(model.config, hidden_dim=37)
    model.blocks[1].feed_forward = jgpt.FeedForward(wider, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="can't be exported: it has other parameters"):
        jgpt.save_hf(model, tmp_path / "wider")
    model.blocks[1].feed_forward = plain
    jgpt.save_hf(model, tmp_path / "plain")


# what is written


def test_what_is_only_of_training_and_the_width_of_parameters(tmp_path):
    """What a model computes is compared with transformers, in tests/parity."""
    model = random_model(param_dtype="bfloat16", hidden_dim=None, dropout=0.2)
    folder = tmp_path / "gpt2"

    jgpt.save_hf(model, folder)
    again = jgpt.load_hf(folder)

    stored = {"param_dtype": "float32", "hidden_dim": 4 * 21}
    assert again.config == dataclasses.replace(model.config, **stored)
    assert_same_weights(again, model)
    # the weights can be read by whoever reads the config
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1


SPELLED_OUT = {"num_kv_heads": 3, "head_dim": 7, "attention_scale": 7**-0.5, "zero_init": True}


@pytest.mark.parametrize(
    "config",
    [{"activation": "gelu_tanh", "norm_scale": False}, {**GPT2, **SPELLED_OUT}],
    ids=["without biases and scales", "defaults spelled out"],
)
def test_the_same_function_in_gpt2s_words(config, tmp_path):
    model = random_model(jgpt.ModelConfig(**SIZES, **config))
    tokens = jnp.arange(10).reshape(2, 5)

    jgpt.save_hf(model, tmp_path / "gpt2")
    again = jgpt.load_hf(tmp_path / "gpt2")

    assert again.config.use_bias is True
    assert again.config.qkv_bias is True
    np.testing.assert_array_equal(again(tokens), model(tokens))


ONE_OF_EACH = {"head_bias", "norm", "ngram_sizes"}
"""Fields of each kind; the others are read in the same way."""


@pytest.mark.parametrize(
    ("family", "fields"),
    only(
        lambda case: len(case[1]) > 1 or not ONE_OF_EACH.isdisjoint(case[1]),
        [
            # the first field is what is refused
            (
                "gpt2",
                {"head_bias": True, "tie_embeddings": False, "vocab_size": 23},
            ),  # the width is 21
            ("gpt2", {"head_bias": True, "tie_embeddings": False, "use_bias": False}),
            ("gpt2", {"num_kv_heads": 3, "num_heads": 6, "embed_dim": 24}),
            ("gpt2", {"norm": "rms"}),
            ("gpt2", {"qk_norm": True}),
            ("gpt2", {"attention_scale": 0.7}),
            ("gpt2", {"attention_window": 3}),
            ("gpt2", {"ngram_sizes": (2, 3)}),
            ("gpt2", {"embedding_shortcut": True}),
            ("gpt2", {"logit_softcap": 15.0}),
            ("qwen3", {"norm": "layer"}),
            ("qwen3", {"qkv_bias": True}),
            ("qwen3", {"qk_norm": False, "qk_norm_scale": False, "gated": False}),  # Apertus's
            ("qwen3", {"use_bias": True}),
            ("qwen3", {"attention_window": 3}),
            ("qwen3", {"logit_softcap": 15.0}),
            ("qwen3", {"attention_scale": 0.7}),
        ],
    ),
    ids=str,
)
def test_what_the_format_cannot_say_is_rejected(family, fields, tmp_path):
    model = abstract_model(config_of(family, **fields))
    name, value = next(iter(fields.items()))
    complaint = re.escape(f" `{name}={value!r}`")

    with pytest.raises(ValueError, match=complaint):
        jgpt.save_hf(model, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("abc", r"\(3\): a, b, c$"),
        ("dacb", r"\(4\): a, b, c, …$"),
    ],
)
def test_up_to_three_tensors_are_named(names, shown):
    with pytest.raises(ValueError, match=f"^missing tensors {shown}"):
        require_names(set(), set(names))


def test_a_tokenizer_from_elsewhere_is_told_by_its_size():
    """It is the model's, or less than 512 below it where that is padded to a multiple of 64."""
    require_its_tokenizer(random_model(vocab_size=576), characters(65, first=256))
    require_its_tokenizer(random_model(vocab_size=65), characters(65, first=256))
    for vocab_size, wrong in ((576, 64), (576, 577), (575, 65)):
        other = characters(wrong, first=256)
        with pytest.raises(
            ValueError, match=f"has {wrong} tokens and the model `vocab_size={vocab_size}`: they"
        ):
            require_its_tokenizer(random_model(vocab_size=vocab_size), other)


def test_what_an_import_would_refuse_is_not_exported(tmp_path):
    """A tokenizer of more tokens than the model has embeddings for."""
    tokenizer = jgpt.BPETokenizer.train([TEXT], 263)

    with pytest.raises(ValueError, match="has 263 tokens and the model `vocab_size=262`"):
        jgpt.save_hf(random_model(vocab_size=262), tmp_path / "out", tokenizer=tokenizer)

    assert not (tmp_path / "out").exists()


def test_byte_pairs_get_tokens_without_a_text_for_the_padding():
    tokenizer = jgpt.BPETokenizer.train([TEXT], 263)

    padded = with_padding(tokenizer, 320)

    for restored in (padded, tokenizer_from_json(padded.to_json())):
        assert restored.vocab_size == 320
        assert restored.decode([262, 263, 319, 262]) == tokenizer.decode([262, 262])
        assert restored.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
        with pytest.raises(ValueError, match="token 320 at position 0 is outside the vocabulary"):
            restored.decode([320])
    # a tokenizer without padding is written as before
    assert "vocab_size" not in tokenizer.to_json()
    with pytest.raises(ValueError, match="has 263 tokens and the model `vocab_size=262`"):
        with_padding(tokenizer, 262)
    with pytest.raises(ValueError, match="has 65 tokens and the model `vocab_size=576`"):
        with_padding(characters(65), 576)


def test_nothing_is_overwritten_and_nothing_is_left_half_written(model, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    partial = tmp_path / "gpt2.partial"  # nobody's, perhaps the user's
    for folder in (mine, partial):
        folder.mkdir()
        (folder / "thesis.txt").write_text("two years")

    def disk_full(*arguments, **options):
        raise safetensors.SafetensorError("No space left on device")

    with pytest.raises(FileExistsError, match="mine already exists"):
        jgpt.save_hf(model, mine)
    monkeypatch.setattr("safetensors.numpy.save_file", disk_full)
    with pytest.raises(OSError, match="can't be written: No space left"):
        jgpt.save_hf(model, tmp_path / "gpt2")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2.partial", "mine"]
    for folder in (mine, partial):
        assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
        assert (folder / "thesis.txt").read_text() == "two years"


def test_a_gguf_file_is_written_one_tensor_at_a_time(tmp_path):
    """Beside the model: a large one would not fit into memory twice."""
    tokenizer = characters(65)
    model = random_model(vocab_size=65, num_layers=6, embed_dim=192)
    size = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
    save_gguf(model, tmp_path / "first", tokenizer=tokenizer)  # what compiles once does it here
    tracemalloc.start()

    save_gguf(model, tmp_path / "second", tokenizer=tokenizer)

    _, peak = tracemalloc.get_traced_memory()  # of NumPy's arrays; JAX's are the model
    tracemalloc.stop()
    assert peak < size / 2


def test_each_preset_is_exported_or_names_the_nearest_one_that_is():
    kinds = {}
    for name, (_, config) in PRESETS.items():
        try:
            kinds[name] = hf_config(config.model)["model_type"]
        except ValueError as refused:
            kinds[name] = str(refused).rpartition("the preset ")[2]
    of_gpt2 = (
        "nanogpt-cpu",
        "nanogpt-char",
        "tiny",
        "lecture",
        *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    )
    assert kinds == {
        **dict.fromkeys(of_gpt2, "gpt2"),
        "modern": "apertus",
        **dict.fromkeys(("modern-cpu", "shakespeare-best", "modern-7b"), "modern has one"),
        "bigram": "nanogpt-cpu has one",
    }


# what is read


def test_of_several_unsupported_fields_the_first_by_name_is_reported():
    """The same one in every process, though texts in a set have another order in each."""
    format = formats.GPT2
    fixed = sorted(format.defaults.keys() - dict(format.fields).keys())
    assert len(fixed) == 9
    sizes = {"vocab_size": 11, "n_positions": 7, "n_layer": 2, "n_head": 3, "n_embd": 21}

    for first in range(len(fixed)):
        unsupported = dict.fromkeys(fixed[first:], "another")
        with pytest.raises(ValueError, match=f"^{fixed[first]}='another' is not supported"):
            read_config(sizes | unsupported, format)


UNSUPPORTED = "is not supported"


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        ("gpt2", {"activation_function": "gelu_10"}, "`activation` must be one of"),
        ("gpt2", {"scale_attn_weights": False}, UNSUPPORTED),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, UNSUPPORTED + ", only False"),
        ("gpt2", {"add_cross_attention": True}, UNSUPPORTED),
        ("gpt2", {"is_causal": False}, UNSUPPORTED + ", only True"),
        ("gpt2", {"is_causal": None}, UNSUPPORTED + ", only True"),
        ("gpt2", {"is_encoder_decoder": True}, UNSUPPORTED + ", only False"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, UNSUPPORTED + ", only {}"),
        ("gpt2", {"use_alibi": True}, UNSUPPORTED + ": a field that jgpt does not know"),
        ("gpt2", {"b_field": 1, "a_field": 2}, "(unknown: a_field, b_field)"),
        ("gpt2", {"n_head": 4}, "`embed_dim=21` must be divisible by `num_heads=4`"),
        ("gpt2", {"n_embd": "21"}, "`embed_dim` must be an integer, not '21'"),
        ("gpt2", {"n_positions": 12}, "wpe.weight has shape [11, 21], not [12, 21]"),
        ("gpt2", {"n_inner": None}, "h.0.mlp.c_fc.weight has shape [21, 29], not [21, 84]"),
        ("gpt2", {"n_embd": 24}, "wte.weight has shape [17, 21], not [17, 24]"),
        ("gpt2", {"tie_word_embeddings": False}, "missing tensors (1): lm_head.weight"),
        ("gpt2", {"tie_word_embeddings": "no"}, "`tie_embeddings` must be True or False, not 'no'"),
        ("qwen3", {"model_type": "mistral"}, UNSUPPORTED + ", only 'gpt2', 'llama'"),
        ("qwen3", {"attention_bias": True}, UNSUPPORTED + ", only False"),
        ("qwen3", {"mlp_bias": True}, UNSUPPORTED),
        ("qwen3", {"is_causal": False}, UNSUPPORTED + ", only True"),
        ("qwen3", {"embedding_multiplier": 12.0}, UNSUPPORTED + ": a field that jgpt does not"),
        ("qwen3", {"auto_map": {"AutoModel": "m.M"}}, UNSUPPORTED + ": a field that jgpt"),
        ("qwen3", {"partial_rotary_factor": 0.5}, UNSUPPORTED + ", only 1.0"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "factor": 8}}, UNSUPPORTED),
        ("qwen3", {"rope_parameters": {"rope_theta": 5.0, "beta": 1}}, UNSUPPORTED),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, UNSUPPORTED),
        ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 1.0}}, UNSUPPORTED),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, UNSUPPORTED + ", only 'rope_type'"),
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, UNSUPPORTED),
        ("qwen3", {"rope_interleaved": True}, UNSUPPORTED),
        ("qwen3", {"use_sliding_window": True}, UNSUPPORTED),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, UNSUPPORTED),
        ("qwen3", {"quantization_config": {"bits": 4}}, UNSUPPORTED),
        ("qwen3", {"rope_theta": -1.0}, "`rotary_base=-1.0` must be positive"),
        ("qwen3", {"rope_parameters": {"rope_theta": -1.0}}, "`rotary_base=-1.0` must be positive"),
        ("qwen3", {"hidden_size": 26}, "embed_tokens.weight has shape [17, 24], not [17, 26]"),
        ("qwen3", {"head_dim": 9}, "`positions='rotary'` needs an even head size"),
        ("qwen3", {"num_hidden_layers": 3}, "missing tensors (11): layers.2.input_layernorm"),
        ("qwen3", {"intermediate_size": None}, "gate_proj.weight has shape [29, 24], not [96, 24]"),
        ("qwen3", {"model_type": "llama"}, "unexpected tensors (4): layers.0.self_attn.k_norm"),
    ],
    ids=str,
)
def test_a_config_that_is_not_ours_or_not_the_weights(kind, fields, complaint, exported, tmp_path):
    directory = shutil.copytree(exported / kind, tmp_path / kind)
    change(directory / "config.json", **fields)
    if complaint.startswith(UNSUPPORTED):
        name, value = next(iter(fields.items()))
        complaint = f"{name}={value!r} {complaint}"

    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        jgpt.load_hf(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files(directory):
    with pytest.raises(FileNotFoundError, match="there is no folder gpt2: give one with con"):
        jgpt.load_hf("gpt2")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        jgpt.load_hf(directory)


def whole():
    """A file of safetensors with one tensor."""
    return save({"transformer.wte.weight": np.ones(2, np.float32)})


def config_text(text):
    return lambda it: (it / "config.json").write_text(text)


def weights(data):
    return lambda it: (it / "model.safetensors").write_bytes(data)


def tensor(name, array):
    """Another tensor of that name, or none."""

    def damage(directory):
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array
        save_file(tensors, file)

    return damage


LN_F = "transformer.ln_f.bias"
ATTENTION = "transformer.h.0.attn.c_attn.bias"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
INCOMPLETE = "model.safetensors: not a complete safetensors file"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        *(
            (config_text(text), "config.json: ")
            for text in ("", "{", "\x00", '{"model_type": "gpt2"}')
        ),
        (
            tensor("transformer.h.1.mlp.c_fc.bias", None),
            "missing tensors (1): h.1.mlp.c_fc.bias",
        ),
        (tensor(LN_F, np.full(21, np.inf)), "ln_f.bias has NaN or infinity"),
        (weights(LFS), "model.safetensors: it is a pointer of Git LFS"),
        (config_text(LFS.decode()), "config.json: it is a pointer of Git LFS"),
        (tensor("score", np.ones(3)), "unexpected tensors (1): score"),
        (tensor(LN_F, np.ones(3)), "ln_f.bias has shape [3], not [21]"),
        (tensor(ATTENTION, np.ones(64)), "h.0.attn.c_attn.bias has shape [64], not [63]"),
        *(
            (weights(data), INCOMPLETE)
            for data in (
                b"",
                b"\x02" + bytes(7) + b"{",
                whole()[:-1],  # cut short
            )
        ),
    ],
)
def test_a_damaged_directory_is_rejected(damage, complaint, directory):
    damage(directory)
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        jgpt.load_hf(directory)
    assert str(directory) in str(caught.value)


def test_shards(directory, model):
    path = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, shard_names in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in shard_names}, directory / shard)
        for name in shard_names:
            weight_map[name] = shard
    index.write_text(json.dumps({"weight_map": weight_map}))

    loaded = jgpt.load_hf(directory)

    assert_same_weights(loaded, model)

    (directory / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors is missing"):
        jgpt.load_hf(directory)
    save_file(tensors, directory / "model.safetensors")  # preferred, as transformers does
    assert_same_weights(jgpt.load_hf(directory), model)
