"""What keeps the front door true: README, site and release. Not part of the package."""
