"""Edits that no test can notice, and why."""

from tests.contract.edits import Edit

LAZY = "beartype looks at neither the calls nor the items to come"
VALUES = {
    ("nn/kernels.py", "window >= time", "window > time"): (
        "a window as long as the text hides nothing: both ways read the same"
    ),
    ("nn/products.py", "features > PAD_MIN_FEATURES", "features >= PAD_MIN_FEATURES"): (
        "so many features are whole tiles already: nothing is added"
    ),
    ("nn/precision.py", "0.0", "1.0"): "no GPU is as old as one, and no capability counts as none",
    (
        "generation/sampling.py",
        "sampling.top_k < logits.shape[-1]",
        "sampling.top_k <= logits.shape[-1]",
    ): "as many tokens as there are: all are kept, whether they are counted or not",
    (
        "data/corpus.py",
        '(newline := text.rfind("\\n", 1, end)) > 0',
        "(newline := text.rfind('\\n', 1, end)) >= 0",
    ): "a newline is found after the first character, or at -1",
    ("training/step.py", "counted.size > at_once", "counted.size >= at_once"): (
        "an evaluation has one pass: the head is gathered once for it in any case"
    ),
}
"""Of a file, what was there and what took its place."""
HALVES = {"jgpt.data.batches.batches", "jgpt.data.batches.batch"}
"""Functions with an argument that is one of two arrays, each of which has the size's only name."""


def reason_why_equivalent(mutant: Edit) -> str:
    """Why an edit changes nothing that can be seen, or nothing."""
    if mutant.kind.startswith("lazy "):
        return LAZY
    if not mutant.ties:
        return "the name stands once in its function: no other size is tied to it"
    if mutant.where in HALVES and (mutant.before, mutant.after) in {
        ('" tokens"', '" _"'),
        ('" tokens"', '" held_out"'),
    }:
        return "the name's other place is the other half of the same union"
    if mutant.kind == "dtype" and mutant.before == "Shaped":
        return "any dtype was allowed already"
    return VALUES.get((mutant.file, mutant.before, mutant.after), "")
