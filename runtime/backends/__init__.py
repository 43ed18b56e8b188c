"""What runs graphs. One module per library, imported only when a bundle asks for it."""
