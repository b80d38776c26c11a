"""Context parallel: the tokens of a sequence are divided over ranks, and attention sees all of them."""
