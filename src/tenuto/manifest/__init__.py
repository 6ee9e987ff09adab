"""Definitions as YAML: read with a place for every error, written back, compared by field."""
