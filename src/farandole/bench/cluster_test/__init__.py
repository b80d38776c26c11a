"""``farandole test``: a real job over all hosts that proves the set-up."""
