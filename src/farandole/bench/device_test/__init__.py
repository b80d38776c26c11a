"""``farandole test --device KIND``: a device of this machine, compared with the CPU before it trains."""
