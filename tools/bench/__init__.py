"""`speccompile bench`: ways of decoding against each other on the same prompts, in one run. See `command`."""
