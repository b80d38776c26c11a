"""Command-line options that several commands share, and the flags of horovodrun."""
