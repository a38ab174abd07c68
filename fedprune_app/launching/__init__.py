"""How Flower's processes come to life."""
