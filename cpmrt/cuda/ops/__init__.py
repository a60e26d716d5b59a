"""The op contract on a GPU: every op with its plan, compile-time constants, scratch and launch."""
