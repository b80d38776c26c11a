"""All-reduce inside one host, through memory that its ranks share."""
