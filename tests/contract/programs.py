"""Programs that call everything in the package that takes or returns arrays, and their sizes."""

import atexit
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import jgpt
from jgpt import attend, attention_weights
from jgpt.cli.report import describe_optimizer
from jgpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data import batches, dataset, prepared
from jgpt.data.characters import NumberTokenizer, OwnTokenizer
from jgpt.data.encode import count_characters
from jgpt.generation.text import default_prompt
from jgpt.interop import huggingface
from jgpt.nn import int8, models
from jgpt.nn.attention import causal_mask, document_mask, positions_in_documents
from jgpt.nn.int8 import Int8Linear, quantise
from jgpt.nn.kernels import attend_windowed, fused_attend
from jgpt.nn.layers import apply_dropout
from jgpt.nn.loss import cross_entropy, cross_entropy_from, token_losses_from
from jgpt.nn.products import project
from jgpt.nn.stacking import unstack_blocks
from jgpt.page import anatomy, numbers
from jgpt.runs import plots
from jgpt.training import step
from jgpt.training.evaluation import Evaluator
from jgpt.training.objective import next_token_loss
from jgpt.training.state import abstract_state
from tests.contract.calls import Call, overheard
from tests.generation.test_chat import chat_tokenizer

SIZES: dict[str, set[int]] = {
    "batch": {3, 4},  # 4 while training, and in a batch of texts
    "time": {7, 8, 4},  # 4: the first half of 8 positions
    "query": {7, 5},
    "key": {7, 5, 15},
    "heads": {10, 2},
    "kv_heads": {2},
    "head_dim": {12, 6},
    "value_dim": {12, 13},
    "embed_dim": {22},
    "vocab": {17},
    "steps": {6},
    "batches": {11, 1},  # 1: the evaluations of a short run
    "window": {9},
    "tokens": {31, 162, 18, 180, 0},  # 0: the last call of a text's writer
    "held_out": {18},
    "unseen": {0},
}
"""What a name may stand for in the programs below: no size is another name's by chance."""
GENERIC = {"texts", "rows", "features", "in_features", "out_features", "choices", "chunk", "chunks"}
GENERIC |= {"leading"}
"""Names of dimensions that may be anything."""
BATCH, TIME, CONTEXT = 3, 7, 5
LECTURE = ModelConfig(
    vocab_size=17, block_size=8, num_layers=1, num_heads=2, embed_dim=22, hidden_dim=18, dropout=0.1
)
MODERN = dataclasses.replace(
    LECTURE,
    block_size=64,
    num_heads=10,
    num_kv_heads=2,
    head_dim=12,
    activation="silu",
    gated=True,
    tie_embeddings=False,
    positions="rotary",
    norm="rms",
    qk_norm=True,
    qk_norm_scale=True,
    embedding_shortcut=True,
    attention_window=5,
    ngram_sizes=(2, 15),
    ngram_rows=19,
)
BIGRAM = ModelConfig(architecture="bigram", vocab_size=17, block_size=8)


def zeros(make: Callable[[], Any]) -> Any:
    """What a function makes, with zeros for numbers, which is quicker than to draw them."""
    graph, state = nnx.split(nnx.eval_shape(make))
    # to put it on the device compiles nothing
    return nnx.merge(
        graph, jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), state)
    )


def model_of(config: ModelConfig) -> Any:
    return zeros(lambda: models.create_model(config, rngs=nnx.Rngs(0)))


def traced(program: Callable[..., Any], *arrays: Any) -> None:
    """Trace a program, whose result doesn't matter, on such arrays."""

    def run(arrays: Any) -> None:
        program(*arrays)

    jax.eval_shape(run, arrays)


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


FLOAT, INT, BOOL = (functools.partial(of, dtype) for dtype in ("float32", "int32", "bool"))
KEY = jax.eval_shape(lambda: jax.random.key(0))
TOKENS = INT(BATCH, TIME)


def plain_descent() -> optax.GradientTransformation:
    return optax.sgd(0.1)


FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)


def functions() -> None:
    """Attention, layers and the loss, by themselves."""
    qkv = FLOAT(BATCH, 2, TIME, 12), FLOAT(BATCH, 2, CONTEXT, 12), FLOAT(BATCH, 2, CONTEXT, 13)
    mask = BOOL(TIME, CONTEXT)
    traced(attend, *qkv, mask)
    traced(lambda key, *qkvm: attend(*qkvm, dropout=0.1, dropout_key=key), KEY, *qkv, mask)
    traced(attention_weights, *qkv[:2], mask)
    traced(attend, *qkv, BOOL(BATCH, 1, TIME, CONTEXT))
    traced(document_mask, TOKENS)
    traced(positions_in_documents, TOKENS)
    local = [FLOAT(BATCH, 2, TIME, size) for size in (12, 12, 13)]
    mask = causal_mask(TIME, 5)
    windowed = functools.partial(attend_windowed, mask=mask, window=5)
    traced(windowed, *local)
    traced(lambda key, *qkv: windowed(*qkv, dropout=0.1, dropout_key=key), KEY, *local)
    grouped = FLOAT(BATCH, 10, TIME, 12), FLOAT(BATCH, 2, CONTEXT, 12), FLOAT(BATCH, 2, CONTEXT, 12)
    traced(lambda *qkv: fused_attend(*qkv, causal=True, implementation="xla"), *grouped)
    rows = FLOAT(BATCH, TIME, 23)
    kernel = FLOAT(23, 29)
    traced(lambda x, kernel: project(x, kernel, "bfloat16"), rows, kernel)
    traced(quantise, FLOAT(BATCH, 26))
    traced(Int8Linear, FLOAT(23, 29), FLOAT(29))
    traced(Int8Linear, FLOAT(23, 29))
    traced(lambda x, key: apply_dropout(x, 0.1, key), FLOAT(BATCH, 2, TIME), KEY)
    traced(cross_entropy, FLOAT(BATCH, TIME, 17), INT(BATCH, TIME))
    head = jax.tree_util.Partial(lambda x: jnp.zeros((*x.shape[:2], 17), x.dtype))
    for loss in (cross_entropy_from, token_losses_from):
        for max_rows in (1 << 20, 6):
            whole = functools.partial(loss, head=head, max_rows=max_rows)
            traced(whole, FLOAT(BATCH, TIME, 22), TOKENS)


def transformers() -> None:
    """Models and their parts: evaluated, trained, with a cache, and looked into."""
    for config in (MODERN, LECTURE):

        def whole(graph: Any, state: Any, tokens: Any, key: Any) -> None:
            model = nnx.merge(graph, state)
            rngs = nnx.Rngs(dropout=key)
            model(tokens)
            model(tokens, rngs=rngs)
            model.hidden(tokens, documents=tokens)
            model(tokens, cache=model.empty_cache(BATCH))
            model.attention_weights(tokens)

        def parts(graph: Any, state: Any, x: Any, context: Any, key: Any) -> None:
            model = nnx.merge(graph, state)
            rngs = nnx.Rngs(dropout=key)
            heads = model.blocks[0].attention
            head = jgpt.Head(22, 6, dropout=0.1, rngs=nnx.Rngs(0))
            for each in (heads, head):
                each(x, context)
                each(x, context, rngs=rngs)
                each.weights(x)
                each.weights(x, context)
            head(x)

        graph, state = nnx.split(model_of(config))
        x = FLOAT(BATCH, TIME, 22)
        context = FLOAT(BATCH, CONTEXT, 22)
        traced(functools.partial(whole, graph), state, TOKENS, KEY)
        traced(functools.partial(parts, graph), state, x, context, KEY)
        traced(
            lambda model, tokens: model(tokens), int8.with_int8_weights(model_of(config)), TOKENS
        )
    table = model_of(BIGRAM)
    traced(lambda model, tokens: model(tokens), table, TOKENS)
    traced(lambda tokens: anatomy.record_calls(model_of(MODERN), tokens, {}) and None, TOKENS)


TRAIN = TrainConfig(
    model=BIGRAM, optimizer=OptimizerConfig(schedule="constant"), steps=6, batch_size=4
)
STACKED = dataclasses.replace(
    TRAIN,
    model=dataclasses.replace(LECTURE, num_layers=2, scan_layers=True),
    optimizer=OptimizerConfig(optimizer="muon", ema_decay=0.9),
)


def objective_with_metrics(model: Any, tokens: Any, rngs: Any) -> jgpt.Loss:
    loss = next_token_loss(model, tokens, rngs)
    return jgpt.Loss(loss, metrics={"twice": 2 * loss})


def training() -> None:
    """Steps and evaluations."""
    for config in (TRAIN, STACKED):
        state = abstract_state(config)
        if config.model.scan_layers:
            traced(unstack_blocks, state)
        train: Any = step.make_train_steps(config)
        evaluate: Any = step.make_eval_step(config.model)
        train.trace(state, INT(6, 4, 9), KEY, 6, 0)
        evaluate.trace(state["model"], INT(11, 4, 9), BOOL(11, 4, 8))
    tokens = INT(31)
    options: dict[str, Any] = {"seed": 1, "batch_size": 4, "block_size": 8}
    traced(lambda tokens: batches.batches(tokens, first_step=0, steps=6, **options), tokens)
    traced(lambda tokens: batches.batch(tokens, step=2, **options), tokens)

    with_metrics = dataclasses.replace(TRAIN, objective=objective_with_metrics)
    train = step.make_train_steps(with_metrics)
    train.trace(abstract_state(with_metrics), INT(6, 4, 9), KEY, 6, 0)
    held_out = np.zeros(31, np.uint16)
    batches.evaluation_windows(held_out, 8, 4)
    evaluator = Evaluator(TRAIN, held_out)
    weights = nnx.to_pure_dict(nnx.state(model_of(BIGRAM), nnx.Param))
    evaluator.mean(weights)


def sampling() -> None:
    """Tokens and text drawn from a model."""
    key = jax.random.key(0)
    prompt = jnp.ones((BATCH, TIME), jnp.int32)
    lengths = np.full(BATCH, 6, np.int32)
    options: dict[str, Any] = {"max_new_tokens": 0, "key": key, "top_p": 0.9, "min_p": 0.1}
    gpt = model_of(LECTURE)
    for model in (gpt, model_of(BIGRAM)):
        jgpt.generate(model, prompt, **options)
        jgpt.generate(model, prompt, lengths=lengths, **options)
    for count in (0, 31):
        prompts = ("\0" * TIME,) * BATCH
        filters: dict[str, Any] = {"top_k": 3, "top_p": 0.9}
        jgpt.generate_text(gpt, jgpt.ByteTokenizer(), prompts, count, key=key, **filters)
    jgpt.Chat(gpt, chat_tokenizer(), key=key)


def text() -> None:
    """Text to tokens and back."""
    pieces = jgpt.BPETokenizer.train(["ab ab"], 257)
    numbers_of_text = NumberTokenizer(9)
    wrapped = OwnTokenizer.of(numbers_of_text)
    for tokenizer in (numbers_of_text, wrapped):
        tokenizer.encode("1 2")
        tokenizer.decode(np.ones(31, np.int32))
    for tokenizer in (jgpt.CharTokenizer("\0ab"), jgpt.ByteTokenizer(), pieces):
        tokenizer.encode("ab")
        tokenizer.decode(np.ones(31, np.int32))
    pieces.encode_ordinary("ab")
    pieces.encode_part("ab")
    default_prompt(tokenizer)
    numbers.encode_text(tokenizer, "a")


def files() -> None:
    """A run, and what reads and writes it."""
    folder = Path(FOLDER.name)
    plots._running_mean(np.zeros(6), 3)
    plots._draw_smoothed(Figure().add_subplot(), np.arange(6), np.zeros(6), "black")
    (folder / "text").write_text("ab\n" * 60)
    data = DataConfig(data=(str(folder / "text"),))
    dataset.load_dataset(data, block_size=8)
    prepared.prepare(data, folder / "prepared")
    data = DataConfig(data=(str(folder / "prepared"),))
    count_characters(np.zeros(31, np.uint16), jgpt.CharTokenizer("ab"))
    config = dataclasses.replace(
        TRAIN,
        dataset=data,
        eval_interval=3,
        out=str(folder / "run"),
    )
    jgpt.fit(config)
    model, *_ = jgpt.load(folder / "run")
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    huggingface._write_weights({"table.weight": np.ones((17, 17))}, folder / "tensors")
    describe_optimizer(OptimizerConfig(), weights)
    describe_optimizer(OptimizerConfig(make=plain_descent), weights)
    np.ones(31, np.uint16).tofile(folder / "tokens.bin")
    prepared.prepare_tokens(folder / "tokens.bin", folder / "bin", jgpt.CharTokenizer("ab"))
    np.save(folder / "tokens.npy", np.ones(31, np.int64))
    prepared.prepare_tokens(folder / "tokens.npy", folder / "npy")
    dataset.Dataset.from_tokens(np.ones(180, np.int64))
    jgpt.evaluate(folder / "run")
    jgpt.evaluate(folder / "run", data=str(folder / "text"))
    gpt = dataclasses.replace(LECTURE, dropout=0.0, use_bias=True, qkv_bias=True)
    jgpt.save_hf(model_of(gpt), folder / "hf")


PROGRAMS = [functions, transformers, training, sampling, text, files]


@functools.cache
def heard(program: Callable[[], None]) -> dict[str, list[Call]]:
    return overheard(program)


def calls_of(name: str) -> list[Call]:
    """The calls of a callable, by the first program that makes any."""
    for program in PROGRAMS:
        if name in heard(program):
            return heard(program)[name]
    raise AssertionError(f"no program calls {name}: let one in tests/contract/programs.py do so")
