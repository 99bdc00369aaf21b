"""What all tests share: no GPU grabbed, nothing of the user's touched."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
