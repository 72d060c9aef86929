"""Rerank, as defined by Cohere and Jina."""
