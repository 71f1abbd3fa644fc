"""vmm_fd against an emulated CUDA driver, where there is no GPU: see `emulator`."""
