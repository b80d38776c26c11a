"""How the ranks of a group exchange: by shared memory, by messages, or both."""
