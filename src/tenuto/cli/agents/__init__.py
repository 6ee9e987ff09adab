"""`orchestrate agent`, and commands about workers and coordinators.

agents: agent commands. workers: worker list; coordinator status, recover, logs.
drain: worker drain.
"""
