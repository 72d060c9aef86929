"""Authentication and authorization: keys, JSON Web Tokens, scopes and quotas."""
