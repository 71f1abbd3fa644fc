"""`python -m wcache_async` is `wcache`."""

from wcache_async.cli import main

main()
