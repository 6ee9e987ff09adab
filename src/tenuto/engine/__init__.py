"""The use cases of Tenuto. The engine is the only writer of the store.

Each capability is a folder; `engine.py` lists every use case.

engine: the facade, with a method for each use case.
core: shared by all use cases: store, group commit, hints; applies one command to a task.
lookup: one row or `NotFound`, one page, the version guard.
rows: maps rows to model objects and back.
views: response objects of tasks.
Folders: tasks, flows, agents, limits, schedules, tenancy, webhooks, operations.
"""
