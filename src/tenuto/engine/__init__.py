"""The use cases, one file a family; `engine.py` is their table of contents."""
