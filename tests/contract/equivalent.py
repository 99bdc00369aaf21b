"""Edits that no test can notice, and why."""

from tests.contract.edits import Edit

LAZY = "beartype looks at neither the calls nor the items to come"
VALUES = {
    ("generation.py", "top_k < logits.shape[-1]", "top_k <= logits.shape[-1]"): (
        "as many tokens as there are: all are kept, whether they are counted or not"
    ),
}
"""Of a file, what was there and what took its place."""


def reason_why_equivalent(mutant: Edit) -> str:
    """Why an edit changes nothing that can be seen, or nothing."""
    if mutant.kind.startswith("lazy "):
        return LAZY
    if not mutant.ties:
        return "the name stands once in its function: no other size is tied to it"
    return VALUES.get((mutant.file, mutant.before, mutant.after), "")
