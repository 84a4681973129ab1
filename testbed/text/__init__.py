"""About 1 MB of public-domain text for fitting and calibration."""
