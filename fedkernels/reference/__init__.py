"""The operators in plain PyTorch: see README.md in this folder."""
