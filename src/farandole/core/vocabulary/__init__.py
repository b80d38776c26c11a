"""The words that every package speaks: plans, codecs by name, events, errors, units, file names."""
