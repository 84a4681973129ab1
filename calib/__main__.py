"""`python -m rolaq.calib model=tiny`: see conf/calibrate.yaml."""

import os

# read once, when the libraries load: repeatable cuBLAS products, for calib.deterministic; and CPU threads
# that sleep while they wait, which on shared cores is up to three times faster than spinning
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rolaq.calib.run import main
from rolaq.common.cli import run_hydra

if __name__ == "__main__":
    run_hydra("calibrate", main)
