"""Bytes and files: the session file, its compression and its durable writes, and the folder of sessions."""
