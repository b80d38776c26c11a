"""One Python function as a job: handed to ranks in a folder, started by ``farandole run``, its results read."""
