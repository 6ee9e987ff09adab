"""Functions for operators: recovery, metrics, and reads for consistency checks.

coordination: runs recovery duties now; reads recent logs.
metrics: counts metrics from events and samples.
audit: reads the data that consistency checks compare.
"""
