"""Readers of tool calls: one module per kind of call syntax.

A reader consumes one call from the buffer (or a list of them) and reports to the event writer: `start_call` with the
name, `write_arguments` with JSON text as it arrives, `end_call`.

Rules
1. Unreadable text raises `MalformedCall` if nothing was reported yet. The caller turns it into text.
2. After `start_call` a call cannot be withdrawn. The rest goes into the arguments as written, with a warning.
3. Arguments are reported as soon as they are read. Together they form one JSON object if the model wrote one. The
   arguments of a truncated reply stay truncated.
"""
