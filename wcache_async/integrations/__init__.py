"""Engines and libraries that take their weights from the cache: one module each, none imported unasked."""
