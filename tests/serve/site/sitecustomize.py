"""Read by every Python process that SGLang starts: prepares it for a machine without a GPU."""

import sglang_on_cpu

sglang_on_cpu.install()
