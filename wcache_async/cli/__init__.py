"""The `wcache` command: one module per verb, none of which imports torch, rich or asyncio until it needs them."""

from wcache_async.cli.app import main

__all__ = ["main"]
