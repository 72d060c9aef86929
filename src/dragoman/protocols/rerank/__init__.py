"""Rerank, as Cohere and Jina define it."""
