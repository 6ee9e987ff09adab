"""`orchestrate chaos`: a deployment of real processes under faults, and a check of what is left.

What must hold is decided by two witnesses alone: a file that the processes' users write to, outside
of the system, and the database after everything has come to rest.
"""
