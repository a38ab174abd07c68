"""The engine is where Flower begins: messages and their bytes, the exchange with many clients, and state on disk."""
