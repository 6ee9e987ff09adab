"""Workspaces: permissions and secret values.

access: roles, scopes and the caller of a request.
secrets: secrets in the input of a task.
secret_use: which roles, agents and definitions may use a named secret.
redact: removes secret values from text and JSON.
"""
