"""What a run's folder is made of: how it is made and locked, and its manifest."""
