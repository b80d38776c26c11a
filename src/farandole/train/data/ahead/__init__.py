"""What draws ahead of a loop, and what is put off until the loop has a batch."""
