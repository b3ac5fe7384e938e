"""Calls of compiled functions: their entries, rules, tables and machine code."""
