"""With the checks switched off there is no contract to test."""

import jaxtyping

collect_ignore_glob = ["test_*.py"] if jaxtyping.config.jaxtyping_disable else []
