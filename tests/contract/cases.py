"""A case for every callable of jgpt that takes or returns arrays."""

from tests.contract.device_cases import COMPUTING, WEIGHTS
from tests.contract.host_cases import ON_THE_HOST
from tests.contract.sampling_cases import SAMPLING

__all__ = ["CASES", "WEIGHTS"]

CASES = [*COMPUTING, *SAMPLING, *ON_THE_HOST]
