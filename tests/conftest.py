"""What every test runs under."""

import os

from hypothesis import settings

# No deadline: on a shared machine it would measure the neighbours.  CI tries the same examples
# each time, so that a change fails on its own account; `--hypothesis-profile=long` tries many.
settings.register_profile("suite", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=20_000)
settings.load_profile("suite")
