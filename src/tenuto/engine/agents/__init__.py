"""Agents: registration, lanes, subtasks, messages, and questions to people.

registry: agents as users and coordinators see them.
workers: worker processes: alive, draining, gone.
lanes: caches lanes, and which of them an agent can claim from.
eligibility: explains which lanes an agent can claim from.
push: claims for agents whose sessions a gateway starts.
gateways: health of gateways.
mailbox: messages to agents.
subtasks: parks attempts until subtasks finish or people answer.
subtask_tree: passes results up to parents, and cancels down to subtasks.
escalation: reports tasks that failed for good.
inbox: what waits for a person, and the answers.
"""
