"""Runtimes: each turns a claimed task into an output or an exception.

protocol: the interface of runtimes.
function: handlers in this process.
command: commands under the supervisor.
environment: the working folder of a command, and what a task may set.
"""
