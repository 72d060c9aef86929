"""Anthropic messages."""
