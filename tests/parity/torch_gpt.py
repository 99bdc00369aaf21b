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
}


class Attention(nn.Module):
    """Head's and MultiHeadAttention's common part."""

    def __init__(self, embed_dim, num_heads, width, *, causal, qkv_bias):
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.scale = 1 / math.sqrt(width // num_heads)
        self.query = nn.Linear(embed_dim, width, bias=qkv_bias)
        self.key = nn.Linear(embed_dim, width, bias=qkv_bias)
        self.value = nn.Linear(embed_dim, width, bias=qkv_bias)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def weights(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        affinity = self.split(self.query(x)) @ self.split(self.key(source)).mT * self.scale
        if self.causal and context is None:
            future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            affinity = affinity.masked_fill(future, -torch.inf)
        return affinity.softmax(-1)

    def heads(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        value = self.split(self.value(x if context is None else context))
        return (self.weights(x, context) @ value).transpose(1, 2).flatten(-2)


class Head(Attention):
    def __init__(self, embed_dim, head_dim, *, causal=True, use_bias=False):
        super().__init__(embed_dim, 1, head_dim, causal=causal, qkv_bias=use_bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.heads(x, context)


class MultiHeadAttention(Attention):
    def __init__(self, embed_dim, num_heads, *, causal=True, qkv_bias=False, use_bias=True):
        super().__init__(embed_dim, num_heads, embed_dim, causal=causal, qkv_bias=qkv_bias)
        self.projection = nn.Linear(embed_dim, embed_dim, bias=use_bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.projection(self.heads(x, context))


class FeedForward(nn.Module):
    def __init__(self, embed_dim, hidden_dim=None, *, activation="gelu", use_bias=True):
        super().__init__()
        self.activation = activation
        hidden_dim = hidden_dim or 4 * embed_dim
        self.expansion = nn.Linear(embed_dim, hidden_dim, bias=use_bias)
        self.projection = nn.Linear(hidden_dim, embed_dim, bias=use_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(ACTIVATIONS[self.activation](self.expansion(x)))


class LayerNorm(nn.Module):
    def __init__(self, embed_dim, *, epsilon=1e-5, use_bias=True):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(embed_dim))
        self.bias = nn.Parameter(torch.zeros(embed_dim)) if use_bias else None

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + self.epsilon) * self.weight
        return y if self.bias is None else y + self.bias


class Block(nn.Module):
    def __init__(
        self,
        embed_dim,
        num_heads,
        hidden_dim=None,
        *,
        activation="gelu",
        causal=True,
        qkv_bias=False,
        use_bias=True,
        norm_epsilon=1e-5,
    ):
        super().__init__()
        self.attention_norm = LayerNorm(embed_dim, epsilon=norm_epsilon, use_bias=use_bias)
        self.attention = MultiHeadAttention(
            embed_dim, num_heads, causal=causal, qkv_bias=qkv_bias, use_bias=use_bias
        )
        self.feed_forward_norm = LayerNorm(embed_dim, epsilon=norm_epsilon, use_bias=use_bias)
        self.feed_forward = FeedForward(
            embed_dim, hidden_dim, activation=activation, use_bias=use_bias
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position_embedding = nn.Embedding(config.block_size, config.embed_dim)
        self.blocks = nn.ModuleList(
            Block(
                config.embed_dim,
                config.num_heads,
                config.hidden_dim,
                activation=config.activation,
                qkv_bias=config.qkv_bias,
                use_bias=config.use_bias,
                norm_epsilon=config.norm_epsilon,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = LayerNorm(
            config.embed_dim, epsilon=config.norm_epsilon, use_bias=config.use_bias
        )
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bias=config.head_bias)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        return F.linear(x, self.token_embedding.weight) if self.head is None else self.head(x)


class BigramLM(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)
