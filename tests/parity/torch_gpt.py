"""jgpt's modules once more, in plain PyTorch and with the same names: what parity is measured by.

Written from the papers' formulas, without the fused kernels; evaluation only.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu_squared": lambda x: F.relu(x).pow(2),
}


def over_its_root_mean_square(x: Tensor, epsilon: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


class Attention(nn.Module):
    """Head's and MultiHeadAttention's common part."""

    epsilon = 1e-6

    def __init__(self, config, *, causal=True):
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim or config.embed_dim // config.num_heads
        self.causal = causal
        self.window = config.attention_window
        self.rotary = config.positions == "rotary"
        self.base = config.rotary_base
        self.scale = config.attention_scale or 1 / math.sqrt(self.head_dim)
        self.qk_norm = config.qk_norm
        self.query_norm = nn.RMSNorm(self.head_dim, elementwise_affine=config.qk_norm_scale)
        self.key_norm = nn.RMSNorm(self.head_dim, elementwise_affine=config.qk_norm_scale)
        self.query = self.linear(config, self.num_heads)
        self.key = self.linear(config, self.num_kv_heads)
        self.value = self.linear(config, self.num_kv_heads)

    def linear(self, config, heads) -> nn.Linear:
        return nn.Linear(config.embed_dim, heads * self.head_dim, bias=config.qkv_bias)

    @staticmethod
    def split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def for_each_query_head(self, x: Tensor) -> Tensor:
        """Query heads 0, 1, ... of a group stand side by side."""
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def placed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if self.qk_norm:
            x = over_its_root_mean_square(x, self.epsilon)
            x = x if norm is None else x * norm
        return self.turned(x) if self.rotary else x

    def turned(self, x: Tensor) -> Tensor:
        """Feature i and the one half the features further on, as one complex number."""
        time = x.shape[-2]
        half = x.shape[-1] // 2
        pace = self.base ** (-2 * torch.arange(half, dtype=x.dtype) / x.shape[-1])
        angle = torch.outer(torch.arange(time, dtype=x.dtype), pace)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
        return torch.cat([z.real, z.imag], dim=-1)

    def weights(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        query = self.placed(self.split(self.query(x), self.num_heads), self.query_norm.weight)
        key = self.placed(self.split(self.key(source), self.num_kv_heads), self.key_norm.weight)
        affinity = query @ self.for_each_query_head(key).mT * self.scale
        if self.causal and context is None:
            position = torch.arange(x.shape[1])
            distance = position[:, None] - position
            reach = x.shape[1] if self.window is None else self.window
            affinity = affinity.masked_fill((distance < 0) | (distance >= reach), -torch.inf)
        return affinity.softmax(-1)

    def heads(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        value = self.split(self.value(x if context is None else context), self.num_kv_heads)
        read = self.weights(x, context) @ self.for_each_query_head(value)
        return read.transpose(1, 2).flatten(-2)


class Head(Attention):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.heads(x, context)


class MultiHeadAttention(Attention):
    def __init__(self, config, *, causal=True):
        super().__init__(config, causal=causal)
        features = self.num_heads * self.head_dim
        self.projection = nn.Linear(features, config.embed_dim, bias=config.use_bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.projection(self.heads(x, context))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        sizes = config.embed_dim, config.hidden_dim or 4 * config.embed_dim
        self.gate = nn.Linear(*sizes, bias=config.use_bias) if config.gated else None
        self.expansion = nn.Linear(*sizes, bias=config.use_bias)
        self.projection = nn.Linear(*sizes[::-1], bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.projection(activate(self.expansion(x)))
        return self.projection(self.expansion(x) * activate(self.gate(x)))


def norm_of(config):
    options = {"eps": config.norm_epsilon, "elementwise_affine": config.norm_scale}
    if config.norm == "rms":
        return nn.RMSNorm(config.embed_dim, **options)
    return nn.LayerNorm(config.embed_dim, **options, bias=config.use_bias)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = MultiHeadAttention(config)
        self.feed_forward_norm = norm_of(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class NGramEmbedding(nn.Module):
    multiplier = 0x9E3779B1
    missing = -1

    def __init__(self, sizes, num_rows, embed_dim):
        super().__init__()
        self.sizes = sizes
        self.num_rows = num_rows
        self.table = nn.Embedding(len(sizes) * num_rows, embed_dim)

    def hashes(self, ngrams: Tensor) -> Tensor:
        """A number below 2**32 for each n-gram, whose newest token is the last and goes first."""
        mixed = torch.zeros_like(ngrams[..., 0])
        for token in reversed(ngrams.unbind(-1)):
            # what overflows 64 bits is a multiple of 2**32
            mixed = (mixed + token + 1) * self.multiplier & 0xFFFFFFFF
            mixed = mixed ^ mixed >> 15
        return mixed

    def forward(self, tokens: Tensor) -> Tensor:
        found = []
        for place, size in enumerate(self.sizes):
            ngrams = F.pad(tokens, (size - 1, 0), value=self.missing).unfold(1, size, 1)
            rows = self.hashes(ngrams) % self.num_rows + place * self.num_rows
            found.append(F.embedding(rows, self.table.weight))
        return torch.stack(found).sum(0)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.softcap = config.logit_softcap
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position_embedding = (
            nn.Embedding(config.block_size, config.embed_dim)
            if config.positions == "learned"
            else None
        )
        self.ngram_embedding = (
            NGramEmbedding(config.ngram_sizes, config.ngram_rows, config.embed_dim)
            if config.ngram_sizes
            else None
        )
        self.shortcut = (
            nn.Parameter(torch.zeros(config.num_layers)) if config.embedding_shortcut else None
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = norm_of(config)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bias=config.head_bias)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token_embedding(tokens)
        if self.position_embedding is not None:
            embedded = embedded + self.position_embedding.weight[: tokens.shape[1]]
        if self.ngram_embedding is not None:
            embedded = embedded + self.ngram_embedding(tokens)
        x = embedded
        for layer, block in enumerate(self.blocks):
            if self.shortcut is not None:
                x = x + self.shortcut[layer] * embedded
            x = block(x)
        x = self.final_norm(x)
        logits = F.linear(x, self.token_embedding.weight) if self.head is None else self.head(x)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class BigramLM(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)
