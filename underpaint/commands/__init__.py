"""What the command line is made of, beside ``cli.py``: shared arguments, and the commands around a server."""
