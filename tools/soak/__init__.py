"""Soak tests: load on a server of its own for an hour, during which nothing may fail, become late or grow."""
