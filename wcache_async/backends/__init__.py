"""How tensors cross the process boundary: one contract, and a backend for each transport."""
