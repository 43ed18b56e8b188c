"""What proposes trees. One module per drafting method."""
