"""The values that flow through the program: requests, events, replies, errors, and the Engine interface."""
