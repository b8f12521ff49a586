"""The commands. What takes seconds to import is imported by the command that needs it, when it runs: `--help` and a
mistyped option are answered at once."""
