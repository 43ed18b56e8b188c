"""From a checkpoint to a proved bundle: reading, tracing, proving, publishing, and the command line."""
