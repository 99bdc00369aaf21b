"""Leaks that were found in public models are refused, with their line, and proven when mended."""

import re

import pytest

import jgpt
from tests.sight.brute import SHAPE, dependences
from tests.sight.bugs import BUGS, filled, of_padding
from tests.sight.test_programs import looks_ahead

SIZES = {"t": SHAPE[1]}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_refused_with_its_line_and_proven_when_mended(name: str) -> None:
    program, line = BUGS[name]

    def wrong(x):
        return program(x, False)

    def mended(x):
        return program(x, True)

    refused = jgpt.prove(wrong, "float32[b t 3]", causal="t", sizes=SIZES)
    proven = jgpt.prove(mended, "float32[b t 3]", causal="t", separate="b", sizes=SIZES)

    assert not refused
    entry = rf"it comes in at \w+ +bugs\.py:\d+: {re.escape(line)}\n"
    assert re.search(entry, str(refused)), str(refused)
    assert proven, str(proven)
    assert looks_ahead(*dependences(wrong))
    assert not looks_ahead(*dependences(mended))


def test_the_way_goes_by_the_mask_that_lets_a_position_through() -> None:
    refused = jgpt.prove(lambda x: of_padding(x, False), "float32[b t 3]", causal="t", sizes=SIZES)

    assert re.search(r"select_n\[2,5,5\] at \[0,0,4\].*jnp\.where\(mask, ", str(refused))


def test_a_mask_of_a_moderate_number_is_proven_for_smaller_scores_alone() -> None:
    proof = jgpt.prove(lambda x: filled(x, -1e4), "float32[b t 3]", causal="t", sizes=SIZES)

    # minGPT#75: its scores were not
    assert proof
    assert "unmasked scores are below 2064 in size" in proof.assumptions
