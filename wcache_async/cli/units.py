"""Bytes, seconds and counts as people read them."""

__all__ = ["count_text", "duration_text", "size_text"]


def size_text(nbytes: int) -> str:
    """E.g. ``512 B``, ``16.00 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def duration_text(seconds: float) -> str:
    """E.g. ``3.21 ms``, ``321 ms``, ``4.5 s``, ``2 h 03 min``."""
    if seconds < 0.9995:
        milliseconds = 1000 * seconds
        return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def count_text(count: int, noun: str) -> str:
    """E.g. ``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
