"""The `orchestrate` command. Commands import what they need when they run, so that help is fast.

main: the entry, and the map from errors to messages and exit codes.
root: the tree of commands.
base: options and help that all commands share.
connection: opens the engine for a command.
parse: parses arguments. render, output: print tables and JSON. signals: ends commands cleanly.
shared_commands: list, show, pause and delete of schedules and triggers.
limits, complexity, webhooks, completion: commands of these names.
tasks, flows, agents, tenancy, system: folders of commands.
"""
