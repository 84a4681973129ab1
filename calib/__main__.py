"""`python -m rolaq.calib model=tiny`: see conf/calibrate.yaml."""

import os

# cuBLAS reads this once, before its first product; calib.deterministic needs it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from rolaq.calib.run import main
from rolaq.common.cli import run_hydra

if __name__ == "__main__":
    run_hydra("calibrate", main)
