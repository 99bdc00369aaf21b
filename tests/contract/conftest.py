"""With the checks switched off only values are left to test."""

import jaxtyping

collect_ignore_glob = (
    ["test_[!v]*.py"] if jaxtyping.config.jaxtyping_disable else []  # all but test_values.py
)
