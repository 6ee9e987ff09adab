"""Who is calling, and what they may do.

route_access: the table of all routes with the role that each needs.
authentication: resolves tokens to callers, cached for a second.
attempt_tokens: signed tokens of attempts.
agent_tokens: what the token of one agent reaches.
logins: slows down wrong passwords.
throttling: requests per token, quotas per workspace.
"""
