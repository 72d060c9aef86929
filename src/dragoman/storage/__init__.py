"""State that outlives a request: API keys and stored responses."""
