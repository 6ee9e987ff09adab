"""The use cases. The engine is the only writer of the store.

Each capability is a folder; `engine.py` lists every use case.

engine: the facade, with a method for each use case.
core: what all use cases share: store, group commit, hints, and load-decide-write.
rows: maps rows to model objects and back.
views: response objects of tasks.
"""
