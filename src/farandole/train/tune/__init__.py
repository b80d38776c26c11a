"""Settings of the exchange that change while a training runs: ``farandole tune``."""
