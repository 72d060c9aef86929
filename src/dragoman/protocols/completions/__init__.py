"""OpenAI completions."""
