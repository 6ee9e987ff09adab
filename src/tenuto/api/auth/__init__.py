"""Authentication and authorisation of requests.

route_access: checks that a request may use its route, and replays repeated requests.
authentication: resolves tokens to callers; results are cached for one second.
attempt_tokens: signed tokens of attempts.
agent_tokens: limits an agent's token to its own agent, tasks and workers.
logins: limits login tries and slows down wrong passwords.
throttling: request rate per token, task rate per workspace.
"""
