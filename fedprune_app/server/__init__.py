"""What the ServerApp is made of."""
