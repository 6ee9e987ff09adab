"""The HTTP edge: `/api/v1`, health, metrics, live streams. The engine decides, never this."""
