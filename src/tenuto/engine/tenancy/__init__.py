"""Workspaces: accounts, tokens, secrets and their encryption.

accounts: workspaces, users, members, logins and tokens.
passwords: which are allowed, and their hashes.
views: response objects of accounts.
secrets: named secrets, and rotation of encryption keys.
secret_use: checks who can name and receive a named secret.
encryption: encrypts and decrypts the secrets of tasks.
output_redaction: validates what attempts report, and redacts secrets in it.
"""
