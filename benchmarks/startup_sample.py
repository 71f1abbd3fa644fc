"""What one fresh process of `startup.py` tells; needs no torch."""

from msgspec import Struct

__all__ = ["StartupSample"]


class StartupSample(Struct, frozen=True, kw_only=True):
    """In seconds."""

    imports_s: float
    """Process start to everything imported."""
    weights_s: float
    """A model that can compute: loaded and processed, or fetched, its structure built, and bound."""
    state_s: float | None
    """Of that, what is left without building the structure; None where the two cannot be told apart."""
    forward_s: float
    """The first forward, which touches every weight for the first time where they are shared or mapped."""
    total_s: float
    """Process start to the first forward's end."""
    logits: str
    """SHA-256 of what it computed."""
