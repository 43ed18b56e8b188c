"""Training of draft heads: data made by the model itself, features on disk, one module per kind of head."""
