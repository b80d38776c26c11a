"""`fd.prefetch`: batches of any loader, drawn and copied ahead of the loop."""
