"""Makes the site of `make docs` from docs/, the recipes, the options, the commands and the repository's files."""
