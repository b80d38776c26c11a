"""From the options of a command to a started job: here, over ssh, elastic, or by a scheduler."""
