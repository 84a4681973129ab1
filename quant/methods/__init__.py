"""The quantization methods behind one interface (`methods.base.Method`)."""
