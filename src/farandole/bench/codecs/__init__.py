"""``farandole bench codecs``: what each codec costs, saves and loses."""
