"""Shared code of the client sides of the protocols: request fields, reply fields, errors and retries."""
