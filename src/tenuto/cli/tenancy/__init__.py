"""Commands for workspaces, users, tokens, logins and secrets.

accounts: workspace, user, token. login: login, logout. secrets: secret.
"""
