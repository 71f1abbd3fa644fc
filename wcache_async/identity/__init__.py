"""What tells one state from another: its bytes' digests, the files they were read from, how it was built."""
