"""Training heads, benchmarks, the model zoo, scripts: whatever uses both the compiler and the runtime."""
