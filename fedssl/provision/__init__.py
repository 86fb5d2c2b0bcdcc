"""A consortium's keys, certificates and folders from one file; docs/deploy.md uses the commands."""
