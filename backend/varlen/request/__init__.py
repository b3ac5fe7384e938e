"""Requests, their options, and what they are answered with."""
