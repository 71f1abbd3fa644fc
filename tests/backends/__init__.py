"""Tests of `wcache_async.backends`."""
