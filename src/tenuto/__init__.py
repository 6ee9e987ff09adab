"""Durable orchestration for AI agents. See ARCHITECTURE.md for a task's walk through the code."""

__version__ = "0.1.0"
