"""Named real models (`fetch.py`) and the heads trained for them (one folder each, `<model>-medusa`)."""
