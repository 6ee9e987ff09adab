"""Runtimes: each turns a claimed task into an output or an exception.

protocol: the port.
function: handlers in this process.
command: commands under the supervisor.
environment: variables and folder of a command.
"""
