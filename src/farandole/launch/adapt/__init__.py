"""``farandole init``: a training script read as a syntax tree, and the diff that distributes it."""
