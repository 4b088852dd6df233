"""The page of `plurax report`: runs read from their files, and drawn in one HTML file."""
