"""Stage 3: parameters in shards, by torch's FSDP2 with our exchanges."""
