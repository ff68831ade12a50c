"""What a call asks for: every check and message."""
