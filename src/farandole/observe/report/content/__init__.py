"""What the sections of the page are made of: the run that was read, blocks, and how quantities are written."""
