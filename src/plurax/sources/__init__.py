"""Data as people have it: one file a library, which converts what its objects hold."""
