"""``farandole demo``: the whole story on one machine."""
