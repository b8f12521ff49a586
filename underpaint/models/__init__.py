"""Model families: loading, and one package a family."""
