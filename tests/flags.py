"""XLA's flags, which differ from version to version."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

FASTER_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""The emitters and threads that make long runs fast make compiling take four times as long."""

PROBE = "from jaxlib import _jax; _jax.CompileOptions()"


def known_flags(flags: Sequence[str]) -> list[str]:
    """Those of `flags` that the installed XLA knows.

    XLA aborts the process at a flag that it does not know, so another process tries them, which
    takes half a second. To look their names up in jaxlib's binary would be faster, and wrong: JAX
    0.12 has lost the flag `xla_cpu_use_fusion_emitters` and kept its name elsewhere.
    """
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    probe = subprocess.run(
        [sys.executable, "-P", "-c", PROBE], env=environment, capture_output=True, text=True
    )
    if probe.returncode == 0:
        return list(flags)
    named = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", probe.stderr)
    if named is None:
        raise RuntimeError(f"can't ask XLA which flags it knows:\n{probe.stderr}")
    unknown = named[1].split()
    return [flag for flag in flags if flag not in unknown]
