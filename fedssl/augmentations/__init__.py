"""How random views are made of a client's images."""
