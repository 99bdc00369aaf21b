"""A chat model of transformers, imported, trained and exported: it answers and stops as before."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgpt
from jgpt.runs.load import load
from tests.commands import worked

torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TEXT = "It was 1984. Once upon a time, there was a king.\n" * 60
SPECIAL = ["<|endoftext|>", "<s>", "<|im_end|>", "<pad>", "<|im_start|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
SIZES = {
    "max_position_embeddings": 64,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
    "pad_token_id": 3,
    "attention_dropout": 0.25,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(
        **SIZES, head_dim=10, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
}


def chat_tokenizer() -> Any:
    """Byte-pairs with special tokens, an added token, a normaliser and a chat template."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens([tokenizers.AddedToken("KING:", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def write_chat_model(kind: str, folder: Path, seed: int) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    config = CONFIGS[kind]
    assert len(tokenizer) == 291
    config.vocab_size = 320  # padded
    model = transformers.AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3, generator=random)
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 2  # so that an answer ends soon
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1,
        eos_token_id=[2, 0],
        pad_token_id=3,
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=1.3,
    )
    model.save_pretrained(folder)


def answer(folder: Path) -> tuple[list[int], str]:
    """The new tokens and the text of an answer, from transformers' pipeline as it is."""
    pipeline: Any = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    prompt = pipeline.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    tokens = pipeline(MESSAGES, return_tensors=True)[0]["generated_token_ids"]
    text = pipeline(MESSAGES)[0]["generated_text"][-1]["content"]
    assert tokens[: len(prompt)] == prompt
    return tokens[len(prompt) :], text


def assert_same_tokenizer(folder: Path, other: Path) -> None:
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ours: Any = transformers.AutoTokenizer.from_pretrained(other)
    text = "cafe\u0301 KING: <pad>was<|im_end|> It  \n"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert len(ours) == len(theirs)


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT)
    return path


SEEDS = {"llama": 0, "qwen3": 18}
"""Of answers that end after a few tokens, and have one without a text from the padding."""


def read_json(path):
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3"])
def test_a_chat_model_stops_where_it_did(kind, tmp_path):
    theirs = tmp_path / "theirs"
    run = tmp_path / "run"
    out = tmp_path / "out"
    plain = tmp_path / "plain"
    write_chat_model(kind, theirs, SEEDS[kind])
    tokens, text = answer(theirs)
    assert tokens[-1] in (0, 2)
    assert 1 < len(tokens) < 20
    assert max(tokens) > 290

    worked("import", theirs, "--out", run, "--data", text_file(tmp_path))
    worked("train", "--resume", "--out", run, "--steps", 1, "--sample-tokens", 0)
    worked("export", run, "--out", out, "--checkpoint", 1)

    before = jgpt.load_hf(theirs).token_embedding.embedding[...]
    after = jgpt.load_hf(out).token_embedding.embedding[...]
    moved = float(np.abs(before - after).max())
    assert 0 < moved < 1e-4  # trained, by a step of the small learning rate
    assert answer(out) == (tokens, text)
    assert_same_tokenizer(theirs, out)
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (theirs / name).read_bytes(), name
    config = read_json(theirs / "config.json")
    del config["transformers_version"]
    assert read_json(out / "config.json") == config

    # without the files that the run keeps, another token ends an answer
    model, tokenizer, _ = load(run, which=1)
    jgpt.save_hf(model, plain, tokenizer=tokenizer)
    assert read_json(plain / "config.json")["eos_token_id"] == 0
