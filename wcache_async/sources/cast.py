"""Which tensors a dtype cast on load changes, and to what."""

from wcache_async.errors import SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE

__all__ = ["CASTABLE", "cast_dtype", "check_cast"]

CASTABLE = ("float16", "bfloat16", "float32", "float64")
"""The dtypes a cast reads and writes.

float8 and packed sub-byte tensors are left as they are: their values mean something only
together with scales held in other tensors.  So are integers, booleans and complex numbers.
Values beyond the range of the new dtype become infinities, as with `torch.Tensor.to`.
"""


def check_cast(path: str, dtype: str) -> None:
    """Raises SourceError where `dtype` is neither empty nor one a cast can give."""
    if dtype and dtype not in CASTABLE:
        what = "a cast gives no such dtype" if dtype in DTYPE_ITEMSIZE else "there is no such dtype"
        raise SourceError(path=path, reason=f"cannot cast to {dtype!r}: {what}; known are {', '.join(CASTABLE)}")


def cast_dtype(dtype: str, to: str) -> str:
    """What a tensor of `dtype` becomes under a cast to `to` (empty: no cast)."""
    return to if to and dtype in CASTABLE else dtype
