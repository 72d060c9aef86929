"""Who sends a request and what it may do: keys, signed tokens, scopes and quotas."""
