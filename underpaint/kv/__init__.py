"""The prefix K/V cache: pages, the tree that shares them, the codec that stores them, and content caches."""
