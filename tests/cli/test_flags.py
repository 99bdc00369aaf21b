"""Each door speaks its own language: fields in backticks in Python, options on the command line."""

import inspect

import pytest

from jgpt.cli.commands.export import export
from jgpt.cli.commands.sample import sample
from jgpt.cli.options import TRAIN, in_options

SAMPLE, EXPORT = (inspect.signature(it).parameters for it in (sample, export))


@pytest.mark.parametrize(
    ("options", "field", "option"),
    [
        (TRAIN, "`resume=True`", "--resume"),
        (TRAIN, "`use_bias=False`", "--no-use-bias"),
        (TRAIN, "`out='my run'`", "--out 'my run'"),
        (TRAIN, "`mesh=fsdp=N`", "--mesh fsdp=N"),
        (TRAIN, "`trackers=('wandb', 'a b')`", "--trackers wandb 'a b'"),
        (TRAIN, "`out=None`", "--out None"),
        (TRAIN, "`model.dropout`", "--dropout"),
        (TRAIN, "`keep_best`", "--keep-best"),
        (SAMPLE, "`which=4`", "--checkpoint 4"),
        (EXPORT, "`modelfile=True`", "--modelfile"),
        # what a command has no option for stays as it is in Python
        (EXPORT, "`qkv_bias=False`", "`qkv_bias=False`"),
        (TRAIN, "`other.dropout`", "`other.dropout`"),
        (TRAIN, "`git lfs pull`", "`git lfs pull`"),
    ],
)
def test_a_field_is_spelled_as_an_option(options, field, option):
    message = f"a split=test: {field} must be"

    assert in_options(message, options) == f"a split=test: {option} must be"
