"""OpenAI completions: `server` decodes requests and encodes replies, `client` encodes requests."""
