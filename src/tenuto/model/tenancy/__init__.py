"""Workspaces: who may do what, and which values are secret.

access: roles, scopes and the caller of a request.
secrets: secrets in the input of a task.
secret_use: who may use a named secret.
redact: removes secret values from text and JSON.
"""
