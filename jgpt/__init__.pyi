from .attention import attend, attention_weights, causal_mask
from .bigram import BigramLM
from .blocks import Block, FeedForward
from .checkpoint import load
from .config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from .contracts import LEGEND, check, record, typed
from .generation import generate
from .heads import Head, MultiHeadAttention
from .interop import load_gpt2, save_gpt2
from .loss import cross_entropy
from .model import GPT, create_model
from .presets import preset
from .text import generate_text
from .tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from .train import Run, fit

__all__ = [
    "GPT",
    "LEGEND",
    "BPETokenizer",
    "BigramLM",
    "Block",
    "ByteTokenizer",
    "CharTokenizer",
    "DataConfig",
    "FeedForward",
    "Head",
    "ModelConfig",
    "MultiHeadAttention",
    "OptimizerConfig",
    "Run",
    "TrainConfig",
    "attend",
    "attention_weights",
    "causal_mask",
    "check",
    "create_model",
    "cross_entropy",
    "fit",
    "generate",
    "generate_text",
    "load",
    "load_gpt2",
    "preset",
    "record",
    "save_gpt2",
    "typed",
]
