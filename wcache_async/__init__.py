"""A weight cache for PyTorch inference: one daemon keeps a model's tensors, engines attach in milliseconds."""
