"""Generation: prefixes leased from the cache, jobs advanced step by step."""
