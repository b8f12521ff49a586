"""Understanding: dialogues read and answered, many at once."""
