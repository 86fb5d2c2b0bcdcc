"""Engine flower: the same method and the same rounds as in one process, with the clients behind Flower's messages."""
