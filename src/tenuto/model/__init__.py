"""Data and decisions, without I/O: no clock, no database, no imports of other parts.

Each capability is a folder of the same name here, in `engine`, and in most other parts.

bounds: limits on every input, and the checks for them.
errors: every exception that a caller can see, with its stable code.
printable: escapes untrusted text for terminals and logs.
webhooks: event filters, retry delays and the circuit breaker of webhooks.
"""
