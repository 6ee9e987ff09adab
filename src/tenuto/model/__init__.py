"""Pure data and decisions. Imports nothing else of ours, reads no clock, does no I/O."""
