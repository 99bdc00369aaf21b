"""The embeddings of n-grams: which rows stand for them, and what becomes of those."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt import ModelConfig
from jgpt.nn.models import abstract_model
from jgpt.nn.ngrams import NGramEmbedding
from tests.models import compiled, loud

SIZES, ROWS, EMBED_DIM, LONGEST = (2, 4), 19, 6, 4
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2], [50256, 0, 0, 50256, 1, 4, 1]])
RATE = 0.4
CONFIG = ModelConfig(
    vocab_size=17,
    block_size=64,
    num_layers=1,
    num_heads=2,
    embed_dim=EMBED_DIM,
    ngram_sizes=SIZES,
    ngram_rows=ROWS,
    ngram_dropout=RATE,
)
EMBEDDING = NGramEmbedding(CONFIG, rngs=nnx.Rngs(0))


def random_model(config) -> Any:
    return loud(abstract_model(config), size=0.5)


MODEL = random_model(CONFIG)


def rows_of(tokens, embedding=EMBEDDING):
    return np.asarray(compiled(embedding.rows, jnp.asarray(tokens)))


def row_by_hand(text, size, place):
    """The row of a text's last n-gram; what is in front of the text counts as -1."""
    mixed = 0
    for token in reversed(([-1] * size + text)[-size:]):
        mixed = (mixed + token + 1) * 0x9E3779B1 % 2**32
        mixed ^= mixed >> 15
    return place * ROWS + mixed % ROWS


def test_the_rows_are_those_of_the_hash():
    rows = rows_of(TOKENS)
    assert rows.shape == (2, 7, 2)
    for text, its_rows in zip(TOKENS.tolist(), rows.tolist(), strict=True):
        for end, found in enumerate(its_rows, 1):
            by_hand = [row_by_hand(text[:end], size, i) for i, size in enumerate(SIZES)]
            assert found == by_hand
    assert len(set(rows.flat)) > 15
    assert (rows // ROWS == [0, 1]).all()  # each size has rows of its own


def test_an_n_gram_has_one_row_wherever_it_stands():
    rows = rows_of(TOKENS)
    assert rows[0, 3, 0] == rows[1, 6, 0]  # 4, 1
    assert rows[0, 3, 1] != rows[1, 6, 1]  # 3, 1, 4, 1 and 50256, 1, 4, 1


def test_the_order_matters_and_rows_are_used_evenly():
    count, num_rows = 65, 8192
    pairs = np.stack(np.meshgrid(np.arange(count), np.arange(count)), axis=-1).reshape(-1, 2)
    config = ModelConfig(ngram_sizes=(2,), ngram_rows=num_rows)
    embedding = NGramEmbedding(config, rngs=nnx.Rngs(0))
    rows = rows_of(pairs, embedding)[:, 1, 0]
    expected = num_rows * (1 - (1 - 1 / num_rows) ** len(pairs))  # of so many fair draws
    assert len(set(rows.tolist())) > 0.95 * expected
    table = rows.reshape(count, count)
    assert (table == table.T).sum() < 1.1 * count


def test_the_rows_are_added():
    rows, table = rows_of(TOKENS), np.asarray(EMBEDDING.table.embedding[...])
    assert table.shape == (2 * ROWS, EMBED_DIM)
    expected = table[rows[..., 0]] + table[rows[..., 1]]
    np.testing.assert_allclose(compiled(EMBEDDING, jnp.asarray(TOKENS)), expected, rtol=1e-6)


def test_what_is_missing_in_front_of_a_text_is_a_token_of_its_own():
    rows, missing = rows_of(TOKENS), np.full((2, LONGEST - 1), -1)
    after_nothing = rows_of(np.concatenate([missing, TOKENS], axis=1))[:, LONGEST - 1 :]
    assert np.array_equal(rows, after_nothing)
    after_zeros = rows_of(np.concatenate([0 * missing, TOKENS], axis=1))[:, LONGEST - 1 :]
    differs = (rows != after_zeros).any(axis=0)
    assert differs[:, 0].tolist() == [True] + [False] * 6  # the first n - 1 of each size
    assert differs[:, 1].tolist() == [True] * 3 + [False] * 4


def test_a_model_adds_them_to_its_tokens():
    tokens, ngrams = jnp.asarray(TOKENS) % 17, MODEL.ngram_embedding
    assert (ngrams.sizes, ngrams.num_rows) == (SIZES, ROWS)

    def embed(tokens):
        parts = MODEL.token_embedding(tokens), MODEL.position_embedding.embedding[:7]
        return MODEL.embed(tokens), sum(parts), ngrams(tokens)

    embedded, expected, found = compiled(embed, tokens)
    np.testing.assert_allclose(embedded, expected + found, rtol=1e-5, atol=1e-6)
    assert float(abs(found).min(axis=-1).max()) > 1e-3
    without = random_model(ModelConfig(vocab_size=17, num_layers=1, embed_dim=8))
    assert without.ngram_embedding is None
    assert MODEL.empty_cache(3).tokens.shape == (3, LONGEST - 1)
    assert without.empty_cache(3).tokens.shape == (3, 0)


def test_training_drops_the_n_grams_of_whole_positions():
    tokens = jnp.asarray(np.random.default_rng(2).integers(17, size=(40, 64)))
    added = np.asarray(compiled(MODEL.ngram_embedding, tokens))
    bare = np.asarray(compiled(MODEL.embed, tokens)) - added
    train = jax.jit(lambda key: MODEL.embed(tokens, rngs=nnx.Rngs(dropout=key)))

    def kept(seed):
        """What is left of the n-grams, as a part of them."""
        left = np.asarray(train(jax.random.key(seed))) - bare
        ratio = (left * added).sum(-1) / (added * added).sum(-1)
        # all of a position's features are scaled alike
        assert abs(left - ratio[..., None] * added).max() < 1e-5
        return ratio

    ratio = kept(3)
    is_kept = ratio > 0.5
    np.testing.assert_allclose(ratio[is_kept], 1 / (1 - RATE), atol=1e-3)
    np.testing.assert_allclose(ratio[~is_kept], 0, atol=1e-3)
    assert abs(is_kept.mean() - (1 - RATE)) < 4 * (RATE * (1 - RATE) / ratio.size) ** 0.5
    assert not np.array_equal(is_kept[0], is_kept[1])
    np.testing.assert_allclose(kept(3), ratio, atol=1e-6)
    assert not np.array_equal(kept(4) > 0.5, is_kept)


def test_gradients_reach_the_rows_that_were_read_and_no_others():
    tokens = jnp.asarray(TOKENS[:1])
    graph, weights = nnx.split(EMBEDDING)
    gradient = compiled(jax.grad(lambda weights: nnx.merge(graph, weights)(tokens).sum()), weights)
    counts = np.zeros(2 * ROWS)
    np.add.at(counts, rows_of(tokens).ravel(), 1)
    found = np.asarray(jax.tree.leaves(gradient)[0])
    np.testing.assert_array_equal(found, np.repeat(counts[:, None], EMBED_DIM, axis=1))
