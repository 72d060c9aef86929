"""OpenAI embeddings."""
