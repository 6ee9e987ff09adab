"""The `orchestrate` command. Commands import modules when they run, so that `--help` is fast.

main: entry point; turns errors into messages and exit codes.
root: the root command with the list of all commands.
base: base classes of commands and groups; options that every command accepts.
connection: opens the engine or client that a command talks to.
parse: parses arguments. output, render: print tables, fields and JSON.
signals: makes SIGTERM and SIGHUP stop a command like Ctrl-C.
shared_commands: list, show, pause, resume and delete of schedules and triggers.
limits: pause, resume, limit. complexity, webhooks, completion: commands of these names.
tasks, flows, agents, tenancy, system: folders of commands.
"""
