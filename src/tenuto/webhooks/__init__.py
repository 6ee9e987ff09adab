"""Sends signed messages about events to URLs that users give.

deliver: sends the messages that are due.
sender: sends one message.
signature: signs and verifies messages.
url_guard: refuses URLs that lead to private addresses.
"""
