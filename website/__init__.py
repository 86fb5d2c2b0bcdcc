"""What makes the site of `make docs` from docs/, the recipes, the options, the command line and the repository's files."""
