"""A small MCP server on standard streams, whose tool repeats its arguments: `python -m tools.fuzz.mcp_server`."""

import json
import sys
from typing import Any

TOOL = {
    "name": "repeat",
    "description": "Repeat the arguments.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string", "maxLength": 12}}},
    "annotations": {"readOnlyHint": True},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "fuzz", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = "repeated " + json.dumps(params.get("arguments"))
        return {"content": [{"type": "text", "text": text}], "isError": "fail" in text}
    return None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(message["method"], message.get("params") or {})
        reply = {"error": {"code": -32601, "message": "unknown method"}} if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
