"""Authentication and authorisation of requests.

route_access: table of all routes with the role and scope that each needs.
authentication: resolves tokens to callers; results are cached for one second.
attempt_tokens: signed tokens of attempts.
agent_tokens: limits an agent's token to its own agent, tasks and workers.
logins: limits login tries and slows down wrong passwords.
throttling: request rate per token, task rate per workspace.
"""
