"""The quantization methods behind one interface (`methods.base.Method`)."""

from rolaq.quant.methods.base import Method, available, build_method, register

__all__ = ["Method", "available", "build_method", "register"]
