"""OpenAI chat completions: `server` decodes requests and encodes replies, `client` does the reverse."""
