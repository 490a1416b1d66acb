"""The bytes of ops in flight: contributions, parts, received chunks, results."""
