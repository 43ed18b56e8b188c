"""Real models by name (`fetch.py`), and what was trained for them: `<model>-medusa`, `-draft` and `-eagle` folders."""
