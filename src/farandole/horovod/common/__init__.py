"""What all front ends of Horovod's names share: the world, process sets, errors, small helpers."""
