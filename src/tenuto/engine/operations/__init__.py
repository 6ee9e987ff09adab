"""What operators need: coordinators, metrics, and a complete reading of the database.

coordination: starts a cycle now; logs of coordinators.
metrics: counts metrics from events and samples.
audit: reads everything that consistency checks compare.
"""
