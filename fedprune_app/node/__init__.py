"""What a node of a deployment allows, and says of itself."""
