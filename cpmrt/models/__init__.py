"""Model forwards, written once against the op contract."""
