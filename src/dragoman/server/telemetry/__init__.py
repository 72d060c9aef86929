"""Telemetry for the operator. It contains no prompts and no replies, except prompts in the log if configured."""
