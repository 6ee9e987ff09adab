"""Tells other programs what happens: signed messages to URLs that users give."""
