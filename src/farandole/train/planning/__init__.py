"""`fd.find_plan`: a model analysed, plans searched, the best ones tried."""
