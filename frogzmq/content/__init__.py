"""Names for bytes: chunk digests, manifests and roots, receipts. Pure functions, no I/O."""
