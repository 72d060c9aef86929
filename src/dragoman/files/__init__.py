"""Model files: where they come from, how they are downloaded and found, and what their headers contain."""
