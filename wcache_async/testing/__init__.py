"""For tests of anything that speaks the protocol: a peer that says what it is told to."""
