"""`orchestrate agent`, and reading of workers and coordinators.

agents: agents. workers: worker list, coordinator status. drain: lets workers finish and stop.
"""
