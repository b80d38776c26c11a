"""Plain models to measure with: no farandole in them."""
