"""Layers split over ranks (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2)."""
