"""Serves the WebSocket of `/v1/responses`. Each of its requests runs like a POST."""
