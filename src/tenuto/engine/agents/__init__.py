"""Agents: registration, lanes, subtasks, messages, and questions to people.

registry: creates, changes, lists and terminates agents; records their heartbeats.
workers: heartbeats and drain requests of worker processes.
lanes: caches lanes, and which of them an agent can claim from.
eligibility: explains which lanes an agent can claim from.
push: claims for agents whose sessions a gateway starts.
gateways: health of gateways.
mailbox: messages to agents.
subtasks: parks attempts until subtasks finish or people answer.
subtask_tree: wakes parents of finished subtasks, and cancels subtasks of cancelled parents.
escalation: reports tasks that failed for good.
inbox: approvals, questions and escalations for people, and their answers.
"""
