"""Conditions in CEL, evaluated over JSON in a bounded number of steps.

parser: compiles the text of a condition.
operators: evaluates operators, functions and macros.
"""
