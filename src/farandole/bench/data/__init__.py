"""Data sets in the formats in which they are found on disk. Nothing is downloaded."""
