"""The arena: shared memory that the peer owns and the ranks of its machine map too."""
