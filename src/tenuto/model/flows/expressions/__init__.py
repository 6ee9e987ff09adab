"""Conditions in CEL, evaluated over JSON in a bounded number of steps.

parser: compiles the text of a condition.
operators: the operators, functions and macros, and the limit of steps.
patterns: the regular expressions of `matches`, with limited cost.
"""
