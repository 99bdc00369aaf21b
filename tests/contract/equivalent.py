"""Edits that no test can notice, and why."""

from tests.contract.edits import Edit

LAZY = "beartype looks at neither the calls nor the items to come"


def reason_why_equivalent(mutant: Edit) -> str:
    """Why an edit changes nothing that can be seen, or nothing."""
    if mutant.kind.startswith("lazy "):
        return LAZY
    if not mutant.ties:
        return "the name stands once in its function: no other size is tied to it"
    return ""
