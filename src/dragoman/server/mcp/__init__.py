"""Connections to MCP servers, with the package `mcp`, which is optional. Only the parent of front ends has them."""
