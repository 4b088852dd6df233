"""Shardings of tensors on a mesh, resharding between them, annotations, and a plan's rules."""
