"""The wire without a socket: messages, frames, and the state machine of one connection."""
