"""``farandole bench``: one file for the measurements that share options, one for each that has its own."""
