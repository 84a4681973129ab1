"""Offline calibration: OSCAR's fit, then RoLaQ's rotations and thresholds, into artifacts."""
