"""NEO-Unify against golden values, and against itself."""
