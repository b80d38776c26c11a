"""From a job request to a started job: here, over ssh, elastic, or on Ray."""
