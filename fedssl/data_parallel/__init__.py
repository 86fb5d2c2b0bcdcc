"""One client's training divided among several processes, each with a share of every batch (`training.processes`)."""
