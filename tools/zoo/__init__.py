"""Named real models (`fetch.py`) and what was trained for them: one folder each, `<model>-medusa`, `-draft`, `-eagle`."""
