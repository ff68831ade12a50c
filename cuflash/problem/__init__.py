"""The problem that a call poses: its metadata, and every check and message."""
