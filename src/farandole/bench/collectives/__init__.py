"""``farandole bench collectives``: routes beside each other."""
