"""What GPT-2 directories may not contain, and what a directory that jgpt writes is made of."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import safetensors
from flax import nnx
from safetensors.numpy import load, load_file, save, save_file

import jgpt
from jgpt.data.encode import tokenizer_from_json
from jgpt.interop.formats import HF_FORMATS, hf_config, read_config
from jgpt.interop.names import require_its_tokenizer, with_padding
from jgpt.nn.models import abstract_model
from jgpt.presets import PRESETS
from tests.models import config_of, loud, random_gpt, to_torch, weights_of


def random_model(**changes):
    return loud(abstract_model(config_of("gpt2", **changes)), size=0.3)


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


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        # the first field is what is refused; of the first model the width is 21
        ("gpt2", {"head_bias": True, "tie_embeddings": False, "vocab_size": 23}),
        ("gpt2", {"head_bias": True, "tie_embeddings": False, "use_bias": False}),
        ("gpt2", {"num_kv_heads": 3, "num_heads": 6, "embed_dim": 24}),
        ("gpt2", {"norm": "rms"}),
        ("gpt2", {"attention_scale": 0.7}),
        ("gpt2", {"ngram_sizes": (2, 3)}),
        ("gpt2", {"embedding_shortcut": True}),
        ("qwen3", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": False, "qk_norm_scale": False, "gated": False}),  # Apertus's
        ("qwen3", {"attention_window": 3}),
        ("qwen3", {"logit_softcap": 15.0}),
    ],
    ids=str,
)
def test_what_the_format_cannot_say_is_rejected(family, fields, tmp_path):
    model = abstract_model(config_of(family, **fields))
    name, value = next(iter(fields.items()))
    complaint = re.escape(f" `{name}={value!r}`")

    with pytest.raises(ValueError, match=complaint):
        jgpt.save_hf(model, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


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


def test_each_preset_is_exported_or_names_the_nearest_one_that_is():
    nearest = {}
    for name, (_, config) in PRESETS.items():
        try:
            hf_config(config.model)
        except ValueError as refused:
            nearest[name] = str(refused).rpartition("the preset ")[2]
    of_modern = dict.fromkeys(("modern-cpu", "shakespeare-best", "modern-7b"), "modern has one")
    assert nearest == of_modern | {"bigram": "nanogpt-cpu has one"}


# what is read


@pytest.mark.parametrize("format", HF_FORMATS.values(), ids=HF_FORMATS)
def test_what_jgpt_has_no_field_for_has_one_value(format):
    """Of several the first by name is reported, the same one in every process."""
    fields = dict(format.fields)
    fixed = sorted(format.defaults.keys() - fields.keys())
    for first, name in enumerate(fixed):
        unsupported = dict.fromkeys(fixed[first:], "another")
        with pytest.raises(ValueError, match=f"^{name}='another' is not supported"):
            read_config(dict.fromkeys(fields, 1) | unsupported, format)


UNSUPPORTED = "is not supported"


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        ("gpt2", {"activation_function": "gelu_10"}, "`activation` must be one of"),
        ("gpt2", {"use_alibi": True}, UNSUPPORTED + ": a field that jgpt does not know"),
        ("gpt2", {"n_head": 4}, "`embed_dim=21` must be divisible by `num_heads=4`"),
        ("gpt2", {"n_embd": "21"}, "`embed_dim` must be an integer, not '21'"),
        ("gpt2", {"n_positions": 12}, "wpe.weight has shape [11, 21], not [12, 21]"),
        ("gpt2", {"n_inner": None}, "h.0.mlp.c_fc.weight has shape [21, 29], not [21, 84]"),
        ("gpt2", {"tie_word_embeddings": False}, "missing tensors (1): lm_head.weight"),
        ("qwen3", {"model_type": "mistral"}, UNSUPPORTED + ", only 'gpt2', 'llama'"),
        ("qwen3", {"auto_map": {"AutoModel": "m.M"}}, UNSUPPORTED + ": a field that jgpt"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "factor": 8}}, UNSUPPORTED),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, UNSUPPORTED),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, UNSUPPORTED + ", only 'rope_type'"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, UNSUPPORTED),
        ("qwen3", {"rope_parameters": {"rope_theta": -1.0}}, "`rotary_base=-1.0` must be positive"),
        ("qwen3", {"head_dim": 9}, "`positions='rotary'` needs an even head size"),
        ("qwen3", {"num_hidden_layers": 3}, "missing tensors (11): layers.2.input_layernorm"),
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


def config_text(text):
    return lambda it: (it / "config.json").write_text(text)


def weights(data):
    return lambda it: (it / "model.safetensors").write_bytes(data)


def tensor(name, array):
    """Another tensor of that name."""

    def damage(directory):
        file = directory / "model.safetensors"
        save_file(load_file(file) | {name: array}, file)

    return damage


LN_F = "transformer.ln_f.bias"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (config_text("{"), "config.json: "),
        (config_text('{"model_type": "gpt2"}'), "config.json: it has no vocab_size"),
        (config_text(LFS.decode()), "config.json: it is a pointer of Git LFS"),
        (weights(LFS), "model.safetensors: it is a pointer of Git LFS"),
        (weights(b"\x02" + bytes(7) + b"{"), "model.safetensors: not a complete safetensors file"),
        (tensor(LN_F, np.full(21, np.inf)), "ln_f.bias has NaN or infinity"),
        (tensor("score", np.ones(3)), "unexpected tensors (1): score"),
    ],
)
def test_a_damaged_directory_is_rejected(damage, complaint, directory):
    damage(directory)
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        jgpt.load_hf(directory)
    assert str(directory) in str(caught.value)


def in_two_shards(weights: bytes) -> dict[str, bytes]:
    """The files of a model that is too large for one."""
    arrays = load(weights)
    files = {}
    shard_of = {}
    for number, names in enumerate(np.array_split(sorted(arrays), 2), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        files[shard] = save({name: arrays[name] for name in names.tolist()})
        shard_of |= dict.fromkeys(names.tolist(), shard)
    index = json.dumps({"weight_map": shard_of})
    return files | {"model.safetensors.index.json": index.encode()}


def test_shards(directory, model):
    whole = directory / "model.safetensors"
    weights = whole.read_bytes()
    whole.unlink()
    for name, data in in_two_shards(weights).items():
        (directory / name).write_bytes(data)

    assert_same_weights(jgpt.load_hf(directory), model)

    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors is missing"):
        jgpt.load_hf(directory)
    whole.write_bytes(weights)  # preferred, as transformers does
    assert_same_weights(jgpt.load_hf(directory), model)
