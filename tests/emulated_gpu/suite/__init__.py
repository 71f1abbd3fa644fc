"""Tests that run where the emulator is the CUDA driver: `tests.emulated_gpu.test_suite` starts them."""
