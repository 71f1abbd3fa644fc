"""One set of behaviours that every transport backend keeps, between real processes."""
