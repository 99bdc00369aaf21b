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
    epsilon = 1e-6

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.head_dim or config.embed_dim // config.num_heads
        self.causal = True
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
        features = self.num_heads * self.head_dim
        self.projection = nn.Linear(features, config.embed_dim, bias=config.use_bias)

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
            if norm is not None:
                x = x * norm
        if self.rotary:
            x = self.turned(x)
        return x

    def turned(self, x: Tensor) -> Tensor:
        """Feature i and the one half the features further on, as one complex number."""
        time, features = x.shape[-2:]
        half = features // 2
        pair = torch.arange(half, dtype=x.dtype)
        position = torch.arange(time, dtype=x.dtype)
        pace = self.base ** (-2 * pair / features)
        angle = torch.outer(position, pace)
        z = torch.complex(x[..., :half], x[..., half:])
        turned = z * torch.exp(1j * angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def weights(self, x: Tensor) -> Tensor:
        query = self.split(self.query(x), self.num_heads)
        key = self.split(self.key(x), self.num_kv_heads)
        query = self.placed(query, self.query_norm.weight)
        key = self.placed(key, self.key_norm.weight)
        key = self.for_each_query_head(key)
        affinity = query @ key.mT * self.scale
        if self.causal:
            affinity = affinity.masked_fill(self.hidden_keys(x.shape[1]), -torch.inf)
        return affinity.softmax(-1)

    def hidden_keys(self, time: int) -> Tensor:
        """Where a key comes after its query, or too long before it."""
        position = torch.arange(time)
        distance = position[:, None] - position
        later = distance < 0
        if self.window is None:
            return later
        return later | (distance >= self.window)

    def forward(self, x: Tensor) -> Tensor:
        value = self.split(self.value(x), self.num_kv_heads)
        read = self.weights(x) @ self.for_each_query_head(value)
        return self.projection(read.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        embed_dim = config.embed_dim
        hidden_dim = config.hidden_dim or 4 * embed_dim
        self.gate = None
        if config.gated:
            self.gate = nn.Linear(embed_dim, hidden_dim, bias=config.use_bias)
        self.expansion = nn.Linear(embed_dim, hidden_dim, bias=config.use_bias)
        self.projection = nn.Linear(hidden_dim, embed_dim, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = self.expansion(x)
        if self.gate is None:
            hidden = activate(hidden)
        else:
            hidden = hidden * activate(self.gate(x))
        return self.projection(hidden)


def norm_of(config):
    options = {"eps": config.norm_epsilon, "elementwise_affine": config.norm_scale}
    if config.norm == "rms":
        return nn.RMSNorm(config.embed_dim, **options)
    return nn.LayerNorm(config.embed_dim, **options, bias=config.use_bias)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = Attention(config)
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
            product = (mixed + token + 1) * self.multiplier
            # what overflows 64 bits is a multiple of 2**32
            mixed = product & 0xFFFFFFFF
            mixed = mixed ^ (mixed >> 15)
        return mixed

    def forward(self, tokens: Tensor) -> Tensor:
        found = []
        for place, size in enumerate(self.sizes):
            padded = F.pad(tokens, (size - 1, 0), value=self.missing)
            ngrams = padded.unfold(1, size, 1)
            rows = self.hashes(ngrams) % self.num_rows
            rows = rows + place * self.num_rows  # each size has rows of its own
            found.append(F.embedding(rows, self.table.weight))
        return torch.stack(found).sum(0)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        embed_dim = config.embed_dim
        self.softcap = config.logit_softcap
        self.token_embedding = nn.Embedding(config.vocab_size, embed_dim)
        self.position_embedding = None
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.block_size, embed_dim)
        self.ngram_embedding = None
        if config.ngram_sizes:
            self.ngram_embedding = NGramEmbedding(config.ngram_sizes, config.ngram_rows, embed_dim)
        self.shortcut = None
        if config.embedding_shortcut:
            self.shortcut = nn.Parameter(torch.zeros(config.num_layers))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = norm_of(config)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(embed_dim, config.vocab_size, bias=config.head_bias)

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
        if self.head is None:
            logits = F.linear(x, self.token_embedding.weight)
        else:
            logits = self.head(x)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


class BigramLM(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)
