"""Sends signed messages about events to webhook URLs of users.

deliver: sends due messages.
sender: sends one message.
signature: signs and verifies messages.
url_guard: refuses URLs that lead to private addresses.
"""
