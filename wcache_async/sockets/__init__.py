"""Bytes and file descriptors on one Unix socket, on any asyncio event loop."""
