"""Schedules and events: the times at which flows start, and the names of events.

schedule: computes the times of a schedule.
firing: decides which due times start, queue or are skipped.
event_names: names of events, and patterns for triggers.
"""
