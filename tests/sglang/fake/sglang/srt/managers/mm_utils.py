embedding_cache: dict = {}
"""What a tower made of items, by their hash. A flush leaves it."""
