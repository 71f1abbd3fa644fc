"""The side that attaches: one connection, the states fetched over it, and their tensors in a module."""
