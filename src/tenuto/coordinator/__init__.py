"""Repairs and promotes. Any number may run; the leader row saves work, nothing more."""
