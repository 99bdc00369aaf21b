from .config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from .data.byte_pairs import BPETokenizer
from .data.characters import ByteTokenizer, CharTokenizer
from .data.dataset import Dataset, load_dataset
from .generation.chat import Chat
from .generation.decoding import generate
from .generation.text import generate_text
from .interop.huggingface import load_hf, save_hf
from .nn.attention import attend, attention_weights, causal_mask
from .nn.bigram import BigramLM
from .nn.heads import Head, MultiHeadAttention
from .nn.loss import cross_entropy
from .nn.models import LanguageModel
from .nn.transformer import GPT, Block, FeedForward
from .page.html import look
from .presets import PRESETS, preset
from .runs.evaluate import evaluate
from .runs.fit import fit
from .runs.load import load, load_pretrained, save
from .runs.run import Run
from .shapes.calls import watching
from .shapes.contract import check, typed
from .shapes.edits import capture, edit
from .shapes.proofs import prove
from .shapes.source import annotated_source
from .shapes.trace import shape_trace
from .training.objective import Loss
from .training.state import init_state
from .training.step import make_train_steps

__version__: str

__all__ = [
    "GPT",
    "PRESETS",
    "BPETokenizer",
    "BigramLM",
    "Block",
    "ByteTokenizer",
    "CharTokenizer",
    "Chat",
    "DataConfig",
    "Dataset",
    "FeedForward",
    "Head",
    "LanguageModel",
    "Loss",
    "ModelConfig",
    "MultiHeadAttention",
    "OptimizerConfig",
    "Run",
    "TrainConfig",
    "annotated_source",
    "attend",
    "attention_weights",
    "capture",
    "causal_mask",
    "check",
    "cross_entropy",
    "edit",
    "evaluate",
    "fit",
    "generate",
    "generate_text",
    "init_state",
    "load",
    "load_dataset",
    "load_hf",
    "load_pretrained",
    "look",
    "make_train_steps",
    "preset",
    "prove",
    "save",
    "save_hf",
    "shape_trace",
    "typed",
    "watching",
]
