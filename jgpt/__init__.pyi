from .config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from .data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer
from .fitting.fit import Run, fit
from .fitting.progress import Progress
from .generation.decoding import generate
from .generation.text import generate_text, stream_text
from .hardware import Platform, current_platform
from .interop.huggingface import load_gpt2, load_hf, save_gpt2, save_hf
from .nn.attention import attend, attention_weights, causal_mask
from .nn.bigram import BigramLM
from .nn.heads import Head, MultiHeadAttention
from .nn.int8 import with_int8_weights
from .nn.loss import cross_entropy
from .nn.models import LanguageModel, create_model
from .nn.precision import for_platform
from .nn.transformer import GPT, Block, FeedForward
from .pictures.page import look
from .presets import preset
from .runs.load import load, save
from .shapes.calls import TypedCall, watching
from .shapes.capture import capture, edit
from .shapes.contract import check, record, typed
from .shapes.proofs import Proof, prove
from .shapes.trace import ShapeTrace, shape_trace
from .words import LEGEND

__version__: str

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
    "LanguageModel",
    "ModelConfig",
    "MultiHeadAttention",
    "OptimizerConfig",
    "Platform",
    "Progress",
    "Proof",
    "Run",
    "ShapeTrace",
    "TrainConfig",
    "TypedCall",
    "attend",
    "attention_weights",
    "capture",
    "causal_mask",
    "check",
    "create_model",
    "cross_entropy",
    "current_platform",
    "edit",
    "fit",
    "for_platform",
    "generate",
    "generate_text",
    "load",
    "load_gpt2",
    "load_hf",
    "look",
    "preset",
    "prove",
    "record",
    "save",
    "save_gpt2",
    "save_hf",
    "shape_trace",
    "stream_text",
    "typed",
    "watching",
    "with_int8_weights",
]
